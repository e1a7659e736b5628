# SPDX-License-Identifier: Apache-2.0
# Headers, libraries, the command, a CMake package and a pkg-config file. Nothing in them holds the
# prefix, so that the installed tree can be moved.
include(CMakePackageConfigHelpers)

install(TARGETS nybble nybble_static EXPORT nybbleTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/nybble.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET nybble_command)
  install(TARGETS nybble_command DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nybble)
install(EXPORT nybbleTargets NAMESPACE nybble:: DESTINATION ${package_dir})
configure_package_config_file(cmake/nybbleConfig.cmake.in nybbleConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Until 1.0 a minor version may change the interface.
write_basic_package_version_file(nybbleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/nybbleConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/nybbleConfigVersion.cmake DESTINATION ${package_dir})

set(pc_private_libs "")
if(NYBBLE_HAVE_PTHREADPOOL)
  set(pc_private_libs "-lpthreadpool ")
endif()
string(APPEND pc_private_libs "-pthread -lm")
foreach(library ${CMAKE_DL_LIBS})
  string(APPEND pc_private_libs " -l${library}")
endforeach()
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix /prefix/${pkgconfig_dir} /prefix)
configure_file(cmake/nybble.pc.in nybble.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/nybble.pc DESTINATION ${pkgconfig_dir})

# SPDX-License-Identifier: Apache-2.0
# What ctest runs. A test that cannot run here exits with 77 and says why.

function(nybble_add_test name)
  add_test(NAME ${name} COMMAND ${ARGN} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1200)
endfunction()

# ---- Each tests/test_<subject>.c is one cmocka program ------------------------------------------
if(NYBBLE_BUILD_TESTS)
  find_path(CMOCKA_INCLUDE_DIR cmocka.h REQUIRED)
  find_library(CMOCKA_LIBRARY cmocka REQUIRED)

  function(nybble_add_cmocka_test name)
    add_executable(${name} ${ARGN})
    target_include_directories(${name} SYSTEM PRIVATE ${CMOCKA_INCLUDE_DIR})
    target_link_libraries(${name} PRIVATE nybble_checks ${CMOCKA_LIBRARY} Threads::Threads m)
    nybble_add_test(${name} ${name})
  endfunction()

  # A driver and an NVRTC without a GPU, and variants that lack a function.
  function(nybble_add_fake name source)
    add_library(${name} MODULE ${source})
    target_include_directories(${name} PRIVATE include)
    target_compile_definitions(${name} PRIVATE ${ARGN})
    target_link_libraries(${name} PRIVATE Threads::Threads)
    set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fake_cuda)
  endfunction()
  nybble_add_fake(fake_cuda tests/fake_cuda/fake_cuda.c)
  nybble_add_fake(fake_cuda_11 tests/fake_cuda/fake_cuda.c FAKE_CUDA_11)
  nybble_add_fake(fake_cuda_old tests/fake_cuda/fake_cuda.c FAKE_CUDA_OLD)
  nybble_add_fake(fake_nvrtc tests/fake_cuda/fake_nvrtc.c)
  nybble_add_fake(fake_nvrtc_old tests/fake_cuda/fake_nvrtc.c FAKE_NVRTC_OLD)

  file(GLOB NYBBLE_TEST_SOURCES CONFIGURE_DEPENDS tests/test_*.c)
  foreach(source ${NYBBLE_TEST_SOURCES})
    get_filename_component(name ${source} NAME_WE)
    nybble_add_cmocka_test(${name} ${source})
    if(name MATCHES "^test_cuda")
      add_dependencies(${name} fake_cuda fake_cuda_11 fake_cuda_old fake_nvrtc fake_nvrtc_old)
      target_compile_definitions(${name} PRIVATE FAKE_CUDA_DIR="${CMAKE_BINARY_DIR}/fake_cuda")
      target_link_libraries(${name} PRIVATE ${CMAKE_DL_LIBS})
    endif()
  endforeach()

  # Compiles the shipped matrix of CUDA kernels; it takes minutes, so that scripts/run_tests.py runs
  # it once, and ctest does not.
  add_executable(cuda_matrix tests/cuda_matrix.c)
  target_link_libraries(cuda_matrix PRIVATE nybble_checks)

  # A test stands before pthread_create.
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_compile_definitions(test_thread_start PRIVATE NYB_TEST_WRAPS_PTHREAD_CREATE)
    target_link_options(test_thread_start PRIVATE LINKER:--wrap=pthread_create)
  endif()

  # The same tests over the reader for systems and file systems without mmap.
  nybble_add_cmocka_test(test_safetensors_unmapped tests/test_safetensors.c src/io_safetensors.c)
  target_compile_definitions(test_safetensors_unmapped PRIVATE NYB_NO_MMAP)

  # The same tests in a library without a pool of threads.
  nybble_add_cmocka_test(test_context_unpooled tests/test_context.c src/threads.c)
  target_compile_definitions(test_context_unpooled PRIVATE NYB_TEST_UNPOOLED)
  if(NOT NYBBLE_HAVE_PTHREADPOOL)
    target_compile_definitions(test_context PRIVATE NYB_TEST_UNPOOLED)
  endif()

  # The example over MPI, in the build that people install: MPI's own libraries are no subject of
  # sanitizers.
  if(NOT CMAKE_CROSSCOMPILING AND NOT NYBBLE_SANITIZE)
    set(mpi_program "")
    if(NYBBLE_MPI)
      find_package(MPI COMPONENTS C)
    endif()
    if(NYBBLE_MPI AND MPI_C_FOUND)
      add_executable(distributed_mpi examples/distributed_mpi.c)
      target_link_libraries(distributed_mpi PRIVATE nybble_static MPI::MPI_C m)
      set(mpi_program $<TARGET_FILE:distributed_mpi>)
    else()
      set(MPIEXEC_EXECUTABLE "")
    endif()
    nybble_add_test(test_distributed_mpi sh
                    ${PROJECT_SOURCE_DIR}/tests/examples/test_distributed_mpi.sh
                    "${MPIEXEC_EXECUTABLE}" "${mpi_program}")
  endif()

  # The example over NCCL. Everywhere with CUDA and NCCL replaced by stand-ins that hold a device's
  # memory on the host; where both are found, itself (no test: it wants GPUs).
  add_executable(distributed_nccl_on_cpu examples/distributed_nccl.c)
  target_include_directories(distributed_nccl_on_cpu PRIVATE tests/fake_nccl tests/fake_nccl/host)
  target_link_libraries(distributed_nccl_on_cpu PRIVATE nybble_static m)
  foreach(ranks 1 2 3)
    nybble_add_test(test_distributed_nccl_${ranks} distributed_nccl_on_cpu ${ranks})
  endforeach()
  if(NOT CMAKE_CROSSCOMPILING AND NOT NYBBLE_SANITIZE)
    find_package(CUDAToolkit QUIET)
    find_path(NCCL_INCLUDE_DIR nccl.h)
    find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2)
    if(CUDAToolkit_FOUND AND NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
      add_executable(distributed_nccl examples/distributed_nccl.c)
      target_include_directories(distributed_nccl SYSTEM PRIVATE ${NCCL_INCLUDE_DIR})
      target_link_libraries(distributed_nccl PRIVATE nybble_static CUDA::cudart ${NCCL_LIBRARY} m)
    endif()
  endif()

  # What is installed, for the build that people install.
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT CMAKE_CROSSCOMPILING AND NOT NYBBLE_SANITIZE)
    nybble_add_test(test_symbols sh ${PROJECT_SOURCE_DIR}/tests/install/test_symbols.sh
                    ${CMAKE_NM} ${CMAKE_READELF} $<TARGET_FILE:nybble>)
    nybble_add_test(test_install sh ${PROJECT_SOURCE_DIR}/tests/install/test_install.sh
                    ${CMAKE_COMMAND} ${CMAKE_BINARY_DIR} ${CMAKE_C_COMPILER}
                    ${CMAKE_INSTALL_LIBDIR})
  endif()
endif()

# ---- The checks alone, where the libraries of the tests are missing for an emulated processor -----
if(CMAKE_CROSSCOMPILING AND NOT NYBBLE_BUILD_TESTS)
  add_executable(run_checks tests/run_checks.c)
  target_link_libraries(run_checks PRIVATE nybble_checks)
  nybble_add_test(run_checks run_checks)
endif()

# ---- Fuzz targets: tests/fuzz/fuzz_<subject>.c, with seeds and a dictionary where they help -------
if(NYBBLE_FUZZ)
  set(NYBBLE_FUZZ_SECONDS 60 CACHE STRING "How long ctest runs each fuzz target")
  set(NYBBLE_FUZZ_SEED 0 CACHE STRING "Seed of the fuzz targets; 0 takes another each time")
  file(GLOB NYBBLE_FUZZ_SOURCES CONFIGURE_DEPENDS tests/fuzz/fuzz_*.c)
  foreach(source ${NYBBLE_FUZZ_SOURCES})
    get_filename_component(name ${source} NAME_WE)
    string(REPLACE "fuzz_" "" subject ${name})
    add_executable(${name} ${source})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE nybble_static m)
    set(corpus ${CMAKE_BINARY_DIR}/corpus_${subject}) # what is found is kept for the next run
    file(MAKE_DIRECTORY ${corpus})
    set(longest 1024)
    if(subject STREQUAL "cache_file") # whose headers alone are longer
      set(longest 3072)
    endif()
    set(arguments -max_total_time=${NYBBLE_FUZZ_SECONDS} -seed=${NYBBLE_FUZZ_SEED} -timeout=20
                  -rss_limit_mb=2048 -max_len=${longest} -print_final_stats=1 ${corpus})
    if(EXISTS ${PROJECT_SOURCE_DIR}/tests/fuzz/seeds_${subject})
      list(APPEND arguments ${PROJECT_SOURCE_DIR}/tests/fuzz/seeds_${subject})
    endif()
    if(EXISTS ${PROJECT_SOURCE_DIR}/tests/fuzz/${subject}.dict)
      list(APPEND arguments -dict=${PROJECT_SOURCE_DIR}/tests/fuzz/${subject}.dict)
    endif()
    nybble_add_test(${name} ${name} ${arguments})
  endforeach()
endif()

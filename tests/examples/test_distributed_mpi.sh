#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs examples/distributed_mpi.c as one, three and four processes.
# usage: test_distributed_mpi.sh MPIRUN PROGRAM; both "" where the build found no MPI
set -eu
mpirun=$1 program=$2
if [ -z "$mpirun" ]; then
  echo "skipped: CMake found no MPI; scripts/install-deps.sh test brings Open MPI"
  exit 77
fi

oversubscribe=
if "$mpirun" --version 2> /dev/null | grep -qE 'Open MPI|OpenRTE|PRRTE'; then
  # Works as root, on fewer processors than processes, and in a container without a network or the
  # right to read other processes' memory: through shared memory and the loopback alone.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_plm=isolated OMPI_MCA_oob_tcp_if_include=lo OMPI_MCA_pml=ob1
  export OMPI_MCA_btl='^tcp,openib,ofi,usnic,uct' OMPI_MCA_btl_vader_single_copy_mechanism=none
  export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
  export PMIX_MCA_gds=hash HWLOC_COMPONENTS=-gl,-opencl
  oversubscribe=--oversubscribe
fi
for processes in 1 3 4; do
  # shellcheck disable=SC2086
  "$mpirun" -n "$processes" $oversubscribe "$program"
done

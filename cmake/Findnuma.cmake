# Finds libnuma; gives numa::numa.
find_path(NUMA_INCLUDE_DIR numa.h)
find_library(NUMA_LIBRARY numa)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(numa REQUIRED_VARS NUMA_LIBRARY NUMA_INCLUDE_DIR)
if(numa_FOUND AND NOT TARGET numa::numa)
  add_library(numa::numa UNKNOWN IMPORTED)
  set_target_properties(numa::numa PROPERTIES IMPORTED_LOCATION "${NUMA_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${NUMA_INCLUDE_DIR}")
endif()

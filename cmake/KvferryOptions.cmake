# What can be chosen at configuration, and the flags that all of kvferry's own code gets.
set(KVFERRY_WITH_VERBS AUTO CACHE STRING "RDMA transport: ON, OFF or AUTO (when libibverbs and librdmacm are found)")
set(KVFERRY_WITH_CUDA AUTO CACHE STRING "GPU transport: ON, OFF or AUTO (when this version has it and nvcc is found)")
set(KVFERRY_WITH_PYTHON AUTO CACHE STRING "Python bindings: ON, OFF or AUTO (when this version has them and pybind11 is found)")
set(KVFERRY_SANITIZE "" CACHE STRING "Sanitizers for all code: empty, address (with undefined) or thread")
set(KVFERRY_CAF_ROOT "" CACHE PATH "The one prefix to take CAF from; empty: wherever CMake finds it")
option(KVFERRY_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(KVFERRY_BUILD_BENCH "Build transfer_bench and its neighbours" ${PROJECT_IS_TOP_LEVEL})
option(KVFERRY_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(KVFERRY_WERROR "Treat warnings as errors" OFF)
set_property(CACHE KVFERRY_SANITIZE PROPERTY STRINGS "" address thread)

if(PROJECT_IS_TOP_LEVEL)
  # Shared, so that a host program keeps its own versions of fmt, spdlog and the rest. A project that
  # includes this one decides for itself.
  option(BUILD_SHARED_LIBS "Build a shared library" ON)
endif()

# An optional part that this version does not have: asking for it is an error, not a silent nothing.
function(kvferry_part_not_here option what)
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${${option}}" value)
  if(value STREQUAL "AUTO")
    message(STATUS "${what}: not part of kvferry ${PROJECT_VERSION}, left out (${option}=AUTO)")
  elseif(value MATCHES "^(ON|YES|Y|TRUE|1)$")
    message(FATAL_ERROR "${option}=${${option}}: ${what} is not part of kvferry ${PROJECT_VERSION} yet. "
      "Set ${option} to AUTO or OFF; docs/architecture.md lists what this version can do.")
  elseif(NOT value MATCHES "^(OFF|NO|N|FALSE|0)$")
    message(FATAL_ERROR "${option}=${${option}}: not one of ON, OFF or AUTO")
  endif()
endfunction()
set_property(CACHE KVFERRY_WITH_VERBS PROPERTY STRINGS AUTO ON OFF)
string(TOUPPER "${KVFERRY_WITH_VERBS}" _verbs)
if(NOT _verbs MATCHES "^(AUTO|ON|YES|Y|TRUE|1|OFF|NO|N|FALSE|0)$")
  message(FATAL_ERROR "KVFERRY_WITH_VERBS=${KVFERRY_WITH_VERBS}: not one of ON, OFF or AUTO")
endif()
kvferry_part_not_here(KVFERRY_WITH_CUDA "the GPU transport (cuda)")
kvferry_part_not_here(KVFERRY_WITH_PYTHON "the Python binding")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

add_compile_options(-Wall -Wextra -Wpedantic)
if(KVFERRY_WERROR)
  add_compile_options(-Werror)
endif()
# Sanitizers triple what the optimizer has to chew: -O1, and line numbers as the only debug information, halve the
# build. Assertions are on.
set(_sanitizer_flags -O1 -g1 -UNDEBUG -fno-omit-frame-pointer)
if(KVFERRY_SANITIZE STREQUAL "address")
  add_compile_options(${_sanitizer_flags} -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(KVFERRY_SANITIZE STREQUAL "thread")
  # GCC warns of every fence, which TSan does not follow. Here fences order atomics only, and those it follows.
  add_compile_options(${_sanitizer_flags} -fsanitize=thread $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  add_link_options(-fsanitize=thread)
  if(NOT KVFERRY_CAF_ROOT)
    message(WARNING "KVFERRY_SANITIZE=thread without KVFERRY_CAF_ROOT: the system's CAF is not instrumented, and every "
      "actor will be reported as a race. Run scripts/build-tsan-caf and pass what it prints as KVFERRY_CAF_ROOT.")
  endif()
elseif(KVFERRY_SANITIZE)
  message(FATAL_ERROR "KVFERRY_SANITIZE=${KVFERRY_SANITIZE}: not one of address, thread or empty")
endif()

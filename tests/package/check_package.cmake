# Installs kvferry into a prefix of its own and builds a small foreign project against it, with CMake and with pkg-config.
# tests/package/CMakeLists.txt says what it must be told.

function(step what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}): ${ARGN}\n${output}")
  endif()
  message(STATUS "${what}: ok")
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/consumer)
file(MAKE_DIRECTORY ${WORK})

# The library of the other kind is built here: only the library. It shares the include folder of the first build, so that
# ccache finds what that build compiled.
if(NOT SHARED STREQUAL BUILD_IS_SHARED)
  set(ENV{CCACHE_NOHASHDIR} 1)
  step("configuring kvferry with BUILD_SHARED_LIBS=${SHARED}" ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/kvferry -G Ninja
    -DBUILD_SHARED_LIBS=${SHARED} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=${TYPE_FLAGS}
    -DCMAKE_CXX_COMPILER=${CXX} -DKVFERRY_WERROR=${WERROR} -DKVFERRY_INCLUDE_LINK=${BUILD}/include -DKVFERRY_BUILD_TESTS=OFF -DKVFERRY_BUILD_BENCH=OFF -DKVFERRY_BUILD_EXAMPLES=OFF)
  set(BUILD ${WORK}/kvferry)
  step("building it" ${CMAKE_COMMAND} --build ${BUILD} --target kvferry)
endif()

step("installing" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component library)
step("configuring the consumer" ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK}/consumer -G Ninja
  -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${FLAGS} -DKVFERRY_CAF_ROOT=${CAF_ROOT})
step("building the consumer" ${CMAKE_COMMAND} --build ${WORK}/consumer)
step("running the consumer" ${CMAKE_COMMAND} -E env KVFERRY_LOG=debug ${WORK}/consumer/consumer)

if(SHARED)
  file(GLOB_RECURSE pc_file ${WORK}/prefix/*/kvferry.pc)
  get_filename_component(pc_dir "${pc_file}" DIRECTORY)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} pkg-config --define-prefix --cflags --libs kvferry
    OUTPUT_VARIABLE flags RESULT_VARIABLE result OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "pkg-config finds no kvferry in ${pc_dir}")
  endif()
  separate_arguments(flags UNIX_COMMAND "${FLAGS} ${flags}")
  get_filename_component(lib_dir "${pc_dir}" DIRECTORY)
  step("building with pkg-config" ${CXX} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/consumer/main.cpp
    -o ${WORK}/consumer/by_pkg_config ${flags} -Wl,-rpath,${lib_dir})
  step("running it" ${WORK}/consumer/by_pkg_config)
endif()

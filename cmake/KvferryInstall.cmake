# Installs the library, its public headers, and what find_package(kvferry) and pkg-config need.
include(CMakePackageConfigHelpers)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvferry)

file(STRINGS ${PROJECT_SOURCE_DIR}/cmake/public_headers.txt _headers)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/public_headers.txt)
foreach(_header IN LISTS _headers)
  get_filename_component(_folder ${_header} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/${_header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvferry/${_folder} COMPONENT library)
endforeach()

install(TARGETS kvferry EXPORT kvferryTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(EXPORT kvferryTargets NAMESPACE kvferry:: DESTINATION ${_package_dir} COMPONENT library)

get_target_property(_type kvferry TYPE)
set(KVFERRY_IS_STATIC OFF)
if(_type STREQUAL "STATIC_LIBRARY")
  set(KVFERRY_IS_STATIC ON)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/kvferryConfig.cmake.in ${PROJECT_BINARY_DIR}/kvferryConfig.cmake
  INSTALL_DESTINATION ${_package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 every minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
set(KVFERRY_PC_VERBS)
if(KVFERRY_HAS_VERBS)
  set(KVFERRY_PC_VERBS ", libibverbs, librdmacm")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/kvferry.pc.in ${PROJECT_BINARY_DIR}/kvferry.pc @ONLY)

install(FILES
  ${PROJECT_BINARY_DIR}/kvferryConfig.cmake
  ${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindCAF.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Findnuma.cmake
  DESTINATION ${_package_dir} COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/kvferry.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)

if(TARGET transfer_bench)
  set_property(TARGET transfer_bench kvferry_info PROPERTY INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS transfer_bench kvferry_info RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
endif()

set_property(TARGET kvferry-directory PROPERTY INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
install(TARGETS kvferry-directory RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)

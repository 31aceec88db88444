# libfdk_cpu for C, with the files by which CMake's find_package(fdk-cpu) and pkg-config find it.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Contains the objects of the kernels, so that an application links one file.
add_library(fdk_cpu native/api/c_api.cpp $<TARGET_OBJECTS:fdk_kernels>)
set_target_properties(fdk_cpu PROPERTIES EXPORT_NAME fdk-cpu)
target_include_directories(fdk_cpu
  PRIVATE native
  PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/native/api>
         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_options(fdk_cpu PRIVATE -Wall -Wextra)
target_link_libraries(fdk_cpu PRIVATE Threads::Threads)

# A C program that links the static library needs the C++ runtime, which its own linker omits.
set(static_libraries ${CMAKE_THREAD_LIBS_INIT})
if(NOT BUILD_SHARED_LIBS)
  foreach(library ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
    if(library MATCHES "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|c\\+\\+_static|m)$")
      target_link_libraries(fdk_cpu INTERFACE ${library})
      list(APPEND static_libraries -l${library})
    endif()
  endforeach()
  list(JOIN static_libraries " " PKG_CONFIG_LIBS)
endif()

set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/fdk-cpu)
install(TARGETS fdk_cpu EXPORT fdk-cpu)
install(FILES native/api/fdk_cpu.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fdk-cpu NAMESPACE fdk-cpu:: FILE fdk-cpu-targets.cmake DESTINATION ${config_folder})
configure_package_config_file(cmake/fdk-cpu-config.cmake.in fdk-cpu-config.cmake
  INSTALL_DESTINATION ${config_folder})
write_basic_package_version_file(fdk-cpu-config-version.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH PKG_CONFIG_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/fdk-cpu.pc.in fdk-cpu.pc @ONLY)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/fdk-cpu-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/fdk-cpu-config-version.cmake
  DESTINATION ${config_folder})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fdk-cpu.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# What `cmake --install` lays down: the library, its two headers, the program, license, documents and examples, and what lets CMake
# and pkg-config find them. A static library says itself what must be linked besides it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/softdelta)

install(TARGETS softdelta EXPORT softdelta)
install(DIRECTORY include/softdelta DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE README.md CONTRIBUTING.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR} PATTERN "*.py" EXCLUDE PATTERN reference EXCLUDE)
if(TARGET softdelta_cuda)
    install(TARGETS softdelta_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/${SOFTDELTA_PLUGIN_FOLDER})
endif()
install(EXPORT softdelta NAMESPACE softdelta:: FILE softdeltaTargets.cmake DESTINATION ${package_dir})
if(TARGET softdelta_cli)
    file(RELATIVE_PATH from_bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_target_properties(softdelta_cli PROPERTIES INSTALL_RPATH $ORIGIN/${from_bin_to_lib})
    install(TARGETS softdelta_cli)
endif()

configure_package_config_file(cmake/softdeltaConfig.cmake.in softdeltaConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(softdeltaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/softdeltaConfig.cmake ${PROJECT_BINARY_DIR}/softdeltaConfigVersion.cmake
        DESTINATION ${package_dir})

file(RELATIVE_PATH from_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
if(NOT BUILD_SHARED_LIBS)
    set(pc_libs " -Wl,--exclude-libs,libsoftdelta.a -fopenmp -lstdc++ -lm") # the runtime of the compiler that links
endif()
configure_file(cmake/softdelta.pc.in softdelta.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/softdelta.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

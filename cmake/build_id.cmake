# SOFTDELTA_BUILD_ID: the version, and a hash of the headers by which the library and an engine in a library of its own
# understand each other. An engine with another one is not used.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/core/*.h)
list(APPEND headers ${PROJECT_SOURCE_DIR}/src/engines/engine.h ${PROJECT_SOURCE_DIR}/src/engines/plugin.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
set(hashes "")
foreach(header IN LISTS headers)
    file(SHA256 ${header} hash)
    string(APPEND hashes ${hash})
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 hash)
set(SOFTDELTA_BUILD_ID "${PROJECT_VERSION} ${hash}")

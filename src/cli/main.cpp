#include <string_view>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "cli/program.h"

int main(int argc, char** argv) {
#ifdef __GLIBC__
    // A diagnosis takes the same memory again hundreds of times: given back to the system and cleared each time, it
    // costs a fifth.
    if (argc > 1 && std::string_view(argv[1]) == "diagnose") {
        mallopt(M_MMAP_THRESHOLD, 1 << 30);
        mallopt(M_TRIM_THRESHOLD, 1 << 30);
    }
#endif
    return softdelta::cli::program(argc, argv);
}

// on_level LEVEL PROGRAM ARGUMENT...: becomes the program, with SOFTDELTA_ISA=LEVEL, where this CPU has the instruction
// set; exits with 77 where it has not.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "softdelta/softdelta.hpp"

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    for (const softdelta::IsaLevel& level : softdelta::isa_levels())
        if (level.name == argv[1] && level.available) {
            setenv("SOFTDELTA_ISA", argv[1], 1);
            execvp(argv[2], argv + 2);
        }
    std::printf("no %s here\n", argv[1]);
    return 77;
}

#include "cli/program.h"

int main(int argc, char** argv) {
    return softdelta::cli::program(argc, argv);
}

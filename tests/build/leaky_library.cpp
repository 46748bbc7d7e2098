// What the symbol gate must refuse: a C++ name beside the C interface.
#define EXPORT __attribute__((visibility("default")))

extern "C" EXPORT int softdelta_fine() {
    return 0;
}

EXPORT int leaked() {
    return 1;
}

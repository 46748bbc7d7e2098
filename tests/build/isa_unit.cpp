// Objects as for one instruction set: a sound one, and the faults that the symbol gate must refuse.
#if defined(FAULT_WEAK)
template <class T>
T twice(T x) {
    return x + x;
}
template int twice(int);  // a weak symbol
#elif defined(FAULT_NAME)
extern const int table = 1;
#elif defined(FAULT_INITIALISER)
int read_clock();
static const int started = read_clock();  // runs before main
int started_avx2() {
    return started;
}
#elif defined(FAULT_ALLOCATION)
int* allocate_avx2() {
    return new int;
}
#else
extern const int table_avx2 = 1;
#endif

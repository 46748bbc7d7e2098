/* What tests and judges of kernels need besides softdelta.h: engines that round as kernels of lower precision do, and
 * what this machine can do at most. */
#ifndef SOFTDELTA_JUDGE_H
#define SOFTDELTA_JUDGE_H

#include <softdelta/softdelta.h>

#ifdef __cplusplus
extern "C" {
#endif

/* execution.rounding: where an engine for tests rounds. */
typedef struct softdelta_rounding {
    size_t size;          /* of this structure */
    uint64_t seed;        /* stages_f32: if not 0, operands of products and stored tensors are rounded stochastically to
                             the storage type. This is the low-precision baseline: it errs as much as an ordinary
                             right kernel */
    int32_t shortcuts;    /* stages_f32: 1 errs as right kernels do that save more work: gates are summed in f32, by
                             log 2 where the seed is odd, near rows with channel gates multiplied in the storage type,
                             scores are in base 2 */
    int32_t float_scores; /* reference: 1 rounds the scores of attention to f32 before the softmax. This shows what
                             f32 keeps of them beside a huge bias */
} softdelta_rounding;

/* With defaults: nothing is rounded. */
static inline softdelta_rounding softdelta_rounding_default(void) {
    softdelta_rounding r = {sizeof(softdelta_rounding), 0, 0, 0};
    return r;
}

/* What softdelta_measure_ceiling measures. */
typedef enum softdelta_ceiling {
    SOFTDELTA_CEILING_F32 = 0,  /* multiply-adds of f32 */
    SOFTDELTA_CEILING_BF16 = 1, /* dot products of bf16 pairs, summed in f32. Matrix tiles read numbers from the
                                   first-level cache: tiles that are cleared, or never read, are multiplied faster */
    SOFTDELTA_CEILING_BF16_REGISTERS = 2 /* the same, of numbers that stay in registers */
} softdelta_ceiling;

/* Measures how many floating-point operations per second this machine can do at most with the selected level, on this
 * many threads at once (0: OpenMP's default). A multiply-add between registers counts as two. The result is the median
 * of a few runs and takes about a second. Errors: INVALID_ARGUMENT, UNSUPPORTED (no kernels, or no instruction for
 * bf16), OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_measure_ceiling(int32_t ceiling, int32_t threads, double* flops_per_second);
/* A loop of one kind of instruction. */
typedef struct softdelta_loop {
    size_t size;      /* of this structure */
    const char* name; /* of the operation */
    double seconds;   /* of a thread for an operation */
    double flops;     /* of an operation, or 0 */
} softdelta_loop;

/* With defaults: filled in by softdelta_measure_loop. */
static inline softdelta_loop softdelta_loop_default(void) {
    softdelta_loop l = {sizeof(softdelta_loop), NULL, 0, 0};
    return l;
}

/* Loops that tell where the time of products by matrix tiles goes; 0 where the selected level has none. */
SOFTDELTA_API int32_t softdelta_loop_count(void);
/* Errors: as softdelta_measure_ceiling. */
SOFTDELTA_API softdelta_status softdelta_measure_loop(int32_t index, int32_t threads, softdelta_loop* loop);
/* Measures how many bytes per second can be read from memory that is far larger than the caches. Allocates 512 MiB or
 * more. Errors: as softdelta_measure_ceiling. */
SOFTDELTA_API softdelta_status softdelta_measure_bandwidth(int32_t threads, double* bytes_per_second);

#ifdef __cplusplus
}
#endif
#endif

/* softdelta: softmax attention and delta rules on CPUs, forward and backward. The C interface.
 *
 * Tensors are DLPack views (DLTensor) on CPU memory: any strides, zero strides broadcast, byte_offset honoured, null
 * strides mean row-major. Types: f64, f32, bf16, f16; masks bool (DLPack code 6, or 8-bit unsigned); lengths and
 * indices i32 or i64. Operands of one call may differ in type. A null pointer means: not given, or not wanted.
 *
 * Every function checks all arguments before it reads or writes a tensor and returns a status; softdelta_last_error()
 * then tells which argument was wrong, what was expected and what was given. Nothing aborts the process.
 *
 * Elements lie aligned to their size. A result has no byte in common with an operand, the workspace or another result:
 * such a call is refused. Views of one buffer that interleave are apart: q, k and v, or their gradients, in one packed
 * tensor. (Views too tangled to tell soon count as sharing.) The one exception is final_state, which may be
 * initial_state itself, element for element: decode in place.
 *
 * Threads are OpenMP's. A short call stays on the caller's thread, however many it may use: one that moves less than
 * about 3 MiB, or does as much arithmetic (docs/performance.md). The environment's SOFTDELTA_SHORT_CALL_BYTES is
 * another limit, read once. A process made by fork() after the library was loaded has one thread: OpenMP's others do
 * not come along. exec() gives it all again.
 *
 * Structures begin with their size and grow only at the end; make them with the *_default() functions below. */
#ifndef SOFTDELTA_SOFTDELTA_H
#define SOFTDELTA_SOFTDELTA_H

#include <dlpack/dlpack.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) || defined(SOFTDELTA_STATIC)
#define SOFTDELTA_API
#else
#define SOFTDELTA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum softdelta_status {
    SOFTDELTA_OK = 0,
    SOFTDELTA_INVALID_ARGUMENT = 1, /* the message names argument, expected and actual */
    SOFTDELTA_UNSUPPORTED = 2,      /* legal, but this engine, build or machine cannot do it */
    SOFTDELTA_OUT_OF_MEMORY = 3,
    SOFTDELTA_INTERNAL = 4
} softdelta_status;

/* The message of this thread's last failed call; "" after a call that succeeded. Valid until the thread's next call. */
SOFTDELTA_API const char* softdelta_last_error(void);

/* Of this header; softdelta_version() tells of the library that was loaded. */
#define SOFTDELTA_VERSION_MAJOR 0
#define SOFTDELTA_VERSION_MINOR 1
#define SOFTDELTA_VERSION_PATCH 0

/* "major.minor.patch" */
SOFTDELTA_API const char* softdelta_version(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * How to compute */

typedef enum softdelta_engine {
    SOFTDELTA_ENGINE_AUTOMATIC = 0,  /* the fastest that does the call */
    SOFTDELTA_ENGINE_FAST = 1,       /* kernels for this machine; unsupported in a build without them */
    SOFTDELTA_ENGINE_REFERENCE = 2,  /* the truth: token recurrence and full softmax in f64 */
    SOFTDELTA_ENGINE_STAGES_F64 = 3, /* the chunk form and blocked softmax in f64, with every intermediate */
    SOFTDELTA_ENGINE_STAGES_F32 = 4  /* the same in f32 */
} softdelta_engine;

/* An engine of this library. Engines are counted from 0, from the fastest on. Errors: INVALID_ARGUMENT. */
typedef struct softdelta_engine_info {
    size_t size;
    const char* name;        /* as execution.engine_name spells it; lives as long as the library */
    const char* description; /* a few words */
    int32_t device_type;     /* of the tensors that it computes, a DLDeviceType */
    int32_t fast;            /* 1: made for speed; "fast" and "automatic" take the first of these that does the call */
    int32_t available;       /* 1: this build and machine can run it */
} softdelta_engine_info;

static inline softdelta_engine_info softdelta_engine_info_default(void) {
    softdelta_engine_info i = {sizeof(softdelta_engine_info), NULL, NULL, 0, 0, 0};
    return i;
}

SOFTDELTA_API int32_t softdelta_engine_count(void);
SOFTDELTA_API softdelta_status softdelta_get_engine(int32_t index, softdelta_engine_info* info);

/* An intermediate of the stages engine: a tensor of the caller that receives it. docs/stages.md lists names, shapes. */
typedef struct softdelta_stage {
    const char* name;
    const DLTensor* tensor;
} softdelta_stage;

typedef struct softdelta_execution {
    size_t size;
    int32_t engine;                /* a softdelta_engine, or automatic with engine_name */
    int32_t threads;               /* at most; 0: OpenMP's default. Results do not depend on it; what is beyond 16
                                      times the processors is cut */
    int64_t chunk_size;            /* stages: rows of a chunk or tile: 16, 32 or 64 (default) */
    uint64_t rounding_seed;        /* stages_f32: other than 0, products' operands and stored tensors are rounded
                                      stochastically to the storage type: the low-precision baseline, which errs as
                                      ordinary right kernels do */
    const softdelta_stage* stages; /* stages: intermediates wanted */
    size_t stage_count;
    int32_t float_products; /* fast: 1 multiplies bf16 operands as f32 where dot products of bf16 exist; 0 */
    void* workspace;        /* fast: memory for the call, which then allocates nothing; NULL: it allocates. How much is
                               needed tell the *_workspace functions; results do not depend on it */
    size_t workspace_size;  /* in bytes */
    int32_t bf16_products;  /* fast: 1 multiplies bf16 operands by dot products of bf16 where those exist; with this and
                               float_products 0 it is done where this CPU's dot products are the faster ones */
    int32_t float_gate_sums; /* stages_f32: 1 sums gates in f32, as many kernels do; 0 sums them in f64 */
    int32_t float_scores;    /* reference: 1 rounds the scores of attention to f32 before the softmax: what f32 keeps of
                                them beside a huge bias */
    const char* engine_name; /* an engine's name (softdelta_get_engine), "automatic" or "fast"; NULL: `engine` says */
    void* stream;            /* engines on a GPU: the stream that the call works on; NULL: the default stream */
} softdelta_execution;

static inline softdelta_execution softdelta_execution_default(void) {
    softdelta_execution e = {
        sizeof(softdelta_execution), SOFTDELTA_ENGINE_AUTOMATIC, 0, 64, 0, NULL, 0, 0, NULL, 0, 0, 0, 0, NULL, NULL};
    return e;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Softmax attention
 *
 *     s = softcap(scale · q kᵀ) + bias,   p = softmax of s over the allowed keys,   o = p v,   lse = log Σ exp s
 *
 * B batch, Lq Lk lengths, H query heads, Hk key/value heads (H is a multiple of Hk; query head h reads key head
 * h / (H/Hk)), D Dv head dimensions, N packed sequences. After Dao (FlashAttention), Shazeer (MQA), Ainslie (GQA). */

typedef enum softdelta_causal {
    SOFTDELTA_CAUSAL_NONE = 0,
    SOFTDELTA_CAUSAL_TOP_LEFT = 1,    /* query i sees keys j ≤ i */
    SOFTDELTA_CAUSAL_BOTTOM_RIGHT = 2 /* query i sees keys j ≤ i + Lk − Lq */
} softdelta_causal;

typedef enum softdelta_empty_row { /* lse of a row that sees no key and has no sink; its o is 0 */
                                   SOFTDELTA_EMPTY_ROW_MINUS_INFINITY = 0,
                                   SOFTDELTA_EMPTY_ROW_PLUS_INFINITY = 1,
                                   SOFTDELTA_EMPTY_ROW_ZERO = 2
} softdelta_empty_row;

typedef struct softdelta_attention_inputs {
    size_t size;
    const DLTensor* q;    /* [B, Lq, H, D];  packed [1, ΣLq, H, D] */
    const DLTensor* k;    /* [B, Lk, Hk, D]; packed [1, ΣLk, Hk, D]; paged [blocks, block rows, Hk, D] */
    const DLTensor* v;    /* as k with Dv; may be a view into k */
    const DLTensor* mask; /* bool [B|1, H|Hk|1, Lq|1, Lk|1], true keeps; packed [N|1, H|Hk|1, max Lq|1, max Lk|1];
                             Lk of caches: as many keys as fit into one */
    const DLTensor* bias; /* float, as mask; added to the scaled scores; −∞ masks */
    const DLTensor* sink; /* [H] a logit that joins the softmax sum and has no value row */
    const DLTensor* cu_seqlens_q;  /* [N+1] packed sequences: 0 = first, ascending, last = ΣLq */
    const DLTensor* cu_seqlens_k;  /* [N+1] */
    const DLTensor* cache_seqlens; /* [B] keys in use of each batch row: they are Lk of causal and window, and no more
                                      than fit: size 1 of k, or max blocks × block rows. Instead of cu_seqlens_k, with
                                      cu_seqlens_q: [N], sequence n has its queries packed and its keys in row n of
                                      caches k [N, Lk, Hk, D], or in blocks: prefill and decode in one batch */
    const DLTensor* block_table;   /* [B, max blocks], with cu_seqlens_q [N, max blocks], i32 or i64, with
                                      cache_seqlens: which block holds which keys */
} softdelta_attention_inputs;

static inline softdelta_attention_inputs softdelta_attention_inputs_default(void) {
    softdelta_attention_inputs i = {
        sizeof(softdelta_attention_inputs), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return i;
}

typedef struct softdelta_attention_options {
    size_t size;
    double scale;   /* NaN (default): D^-1/2 */
    int32_t causal; /* a softdelta_causal; none */
    int64_t window_left; /* −1 (default): unbounded; query i sees keys from i + Lk − Lq − left (top-left: i − left) */
    int64_t window_right; /* −1: unbounded; up to i + Lk − Lq + right (top-left: i + right) */
    double softcap;       /* 0 (default): off; c·tanh(x/c) of the scaled scores, before bias */
    int32_t empty_row;    /* a softdelta_empty_row; −∞ */
    int64_t top_w;        /* −1 (default): off; else each row keeps its top_w largest biases among the allowed
                             keys, ties to the lower index (dynamic mask attention, Shi et al. 2025) */
} softdelta_attention_options;

static inline softdelta_attention_options softdelta_attention_options_default(void) {
    softdelta_attention_options o = {sizeof(softdelta_attention_options), NAN, SOFTDELTA_CAUSAL_NONE, -1, -1, 0,
                                     SOFTDELTA_EMPTY_ROW_MINUS_INFINITY,  -1};
    return o;
}

typedef struct softdelta_attention_outputs {
    size_t size;
    DLTensor* o;   /* [B, Lq, H, Dv] */
    DLTensor* lse; /* [B, H, Lq], packed [1, H, ΣLq]; natural logarithm, sink included */
} softdelta_attention_outputs;

/* Gradients of a loss, given those of o and, if it was used, of lse. Any subset may be asked for. A row without an
 * allowed key has gradient 0. Sums over a group's heads and over broadcast dimensions of bias run in a fixed order. */
typedef struct softdelta_attention_gradients {
    size_t size;
    const DLTensor* o;    /* saved from the forward call, optional */
    const DLTensor* lse;  /* saved from the forward call, optional */
    const DLTensor* d_o;  /* [B, Lq, H, Dv] required */
    const DLTensor* dlse; /* [B, H, Lq] optional */
    DLTensor* dq;         /* each of the shape of its input */
    DLTensor* dk;
    DLTensor* dv;
    DLTensor* dbias;
    DLTensor* dsink;
} softdelta_attention_gradients;

/* options, execution: NULL for defaults. Errors: INVALID_ARGUMENT, UNSUPPORTED (gradients with a block table),
 * OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_attention_forward(const softdelta_attention_inputs* inputs,
                                                           const softdelta_attention_options* options,
                                                           const softdelta_execution* execution,
                                                           const softdelta_attention_outputs* outputs);
SOFTDELTA_API softdelta_status softdelta_attention_backward(const softdelta_attention_inputs* inputs,
                                                            const softdelta_attention_options* options,
                                                            const softdelta_execution* execution,
                                                            const softdelta_attention_gradients* gradients);

/* Bytes of execution.workspace that the same call needs on the selected instruction set; 0 for other engines. Checks
 * all arguments, reads and writes no tensor but lengths. */
SOFTDELTA_API softdelta_status softdelta_attention_forward_workspace(const softdelta_attention_inputs* inputs,
                                                                     const softdelta_attention_options* options,
                                                                     const softdelta_execution* execution,
                                                                     const softdelta_attention_outputs* outputs,
                                                                     size_t* bytes);
SOFTDELTA_API softdelta_status softdelta_attention_backward_workspace(const softdelta_attention_inputs* inputs,
                                                                      const softdelta_attention_options* options,
                                                                      const softdelta_execution* execution,
                                                                      const softdelta_attention_gradients* gradients,
                                                                      size_t* bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * Delta rules: a state S [K, V] per value head, token by token; g is a natural logarithm
 *
 *     delta_rule         S ← S + k (β (v − Sᵀk))ᵀ                                   Yang et al. 2024 (DeltaNet)
 *     gated_delta_rule   S ← e^g S, then as above; g per head                       Yang et al. 2025 (Gated DeltaNet)
 *     kda                S ← diag(e^g) S, then as above; g per key channel          Kimi Linear 2025
 *     comba              d = β (v − Sᵀp), S ← e^g S + k dᵀ                           Hu et al. 2025
 *     simple_gla         S ← e^g S + k vᵀ                                           Qin et al., Sun et al. (retention)
 *     o = scale · Sᵀ q after the update
 *
 * B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head h reads key head h / (HV/H)), K V
 * head dimensions, N sequences. Every finite g is legal, −∞ wipes the state: results are finite wherever all states and
 * outputs fit f32; T = 0, beta = 0 and k = 0 are legal. */

typedef enum softdelta_rule {
    SOFTDELTA_DELTA_RULE = 0,
    SOFTDELTA_GATED_DELTA_RULE = 1,
    SOFTDELTA_KDA = 2,
    SOFTDELTA_COMBA = 3,
    SOFTDELTA_SIMPLE_GLA = 4
} softdelta_rule;

typedef struct softdelta_delta_inputs {
    size_t size;
    const DLTensor* q;             /* [B, T, H, K] */
    const DLTensor* k;             /* [B, T, H, K] */
    const DLTensor* v;             /* [B, T, HV, V] */
    const DLTensor* g;             /* [B, T, HV], kda [B, T, HV, K]; optional for simple_gla, none for delta_rule */
    const DLTensor* g_gamma;       /* [HV] simple_gla: a constant gate instead of g */
    const DLTensor* beta;          /* [B, T, HV]; default 1; none for simple_gla */
    const DLTensor* p;             /* [B, T, H, K] comba */
    const DLTensor* initial_state; /* [N, HV, K, V] or, by option, [N, HV, V, K]; default 0 */
    const DLTensor* A_log;         /* [HV] with use_gate_in_kernel; optional with a lower bound */
    const DLTensor* dt_bias;       /* [HV], kda [HV*K] with use_gate_in_kernel; default 0 */
    const DLTensor* cu_seqlens;    /* [N+1] packed sequences, B = 1: 0 = first, ascending, last = T */
    const DLTensor* state_indices; /* [N] sequence n uses entry state_indices[n] of a pool [pool, HV, K, V] of states;
                                      -1: no sequence (padding), o is 0 and no state is read or written */
} softdelta_delta_inputs;

static inline softdelta_delta_inputs softdelta_delta_inputs_default(void) {
    softdelta_delta_inputs i = {
        sizeof(softdelta_delta_inputs), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return i;
}

typedef struct softdelta_delta_options {
    size_t size;
    int32_t rule;                    /* a softdelta_rule */
    double scale;                    /* NaN (default): K^-1/2 */
    int32_t use_qk_l2norm_in_kernel; /* q, k, p ← x / √(Σx² + 1e-6) */
    int32_t use_gate_in_kernel; /* g is raw: gate = −e^A_log · softplus(g + dt_bias), or with a lower bound … */
    double lower_bound;         /* … lower_bound · σ(e^A_log · (g + dt_bias)); NaN (default): softplus */
    int32_t use_beta_sigmoid_in_kernel; /* beta is a logit: σ(beta) … */
    int32_t allow_neg_eigval;           /* … times 2; without use_beta_sigmoid_in_kernel it changes nothing */
    int32_t state_v_first;              /* states are [.., V, K] */
    int64_t state_interval;             /* rows between the states returned in `states`; 64 */
} softdelta_delta_options;

static inline softdelta_delta_options softdelta_delta_options_default(softdelta_rule rule) {
    softdelta_delta_options o = {sizeof(softdelta_delta_options), rule, NAN, 0, 0, NAN, 0, 0, 0, 64};
    return o;
}

typedef struct softdelta_delta_outputs {
    size_t size;
    DLTensor* o;           /* [B, T, HV, V] */
    DLTensor* final_state; /* [N, HV, K, V] or [N, HV, V, K]; may be initial_state itself (decode in place) */
    DLTensor* states; /* [B, NT, HV, K, V] or [.., V, K]: at every chunk start, NT = Σ ceil(T_n / state_interval) */
} softdelta_delta_outputs;

/* Gradients of a loss, given those of o and final_state (at least one). Any subset may be asked for. With HV > H, dq,
 * dk and dp are sums over the group in a fixed order. */
typedef struct softdelta_delta_gradients {
    size_t size;
    const DLTensor* d_o;          /* [B, T, HV, V] */
    const DLTensor* dfinal_state; /* as final_state; default 0 */
    DLTensor* dq;                 /* each of the shape of its input */
    DLTensor* dk;
    DLTensor* dv;
    DLTensor* dg;
    DLTensor* dg_gamma;
    DLTensor* dbeta;
    DLTensor* dp;
    DLTensor* dinitial_state; /* of the shape of final_state; also without an initial_state */
    DLTensor* dA_log;
    DLTensor* ddt_bias;
} softdelta_delta_gradients;

/* execution: NULL for defaults; options are required (they name the rule). Errors: INVALID_ARGUMENT, UNSUPPORTED,
 * OUT_OF_MEMORY. Decode is the forward call with T = 1 or a few, initial_state and final_state the same pool, and
 * state_indices. */
SOFTDELTA_API softdelta_status softdelta_delta_forward(const softdelta_delta_inputs* inputs,
                                                       const softdelta_delta_options* options,
                                                       const softdelta_execution* execution,
                                                       const softdelta_delta_outputs* outputs);
SOFTDELTA_API softdelta_status softdelta_delta_backward(const softdelta_delta_inputs* inputs,
                                                        const softdelta_delta_options* options,
                                                        const softdelta_execution* execution,
                                                        const softdelta_delta_gradients* gradients);

/* As for attention. */
SOFTDELTA_API softdelta_status softdelta_delta_forward_workspace(const softdelta_delta_inputs* inputs,
                                                                 const softdelta_delta_options* options,
                                                                 const softdelta_execution* execution,
                                                                 const softdelta_delta_outputs* outputs, size_t* bytes);
SOFTDELTA_API softdelta_status softdelta_delta_backward_workspace(const softdelta_delta_inputs* inputs,
                                                                  const softdelta_delta_options* options,
                                                                  const softdelta_execution* execution,
                                                                  const softdelta_delta_gradients* gradients,
                                                                  size_t* bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * This machine
 *
 * The fast engine's kernels are compiled for several instruction sets; the last of them that the CPU has runs. The
 * environment's SOFTDELTA_ISA names another one of those available. With any other name, every call that needs the
 * fast engine's kernels fails with UNSUPPORTED, and so does softdelta_get_isa_level. */

typedef struct softdelta_isa_level {
    size_t size;
    const char* name;      /* as SOFTDELTA_ISA spells it; lives as long as the library */
    int32_t compiled;      /* 1: this build has kernels for it */
    int32_t available;     /* 1: compiled, and this CPU and operating system support it */
    int32_t selected;      /* 1: what the fast engine runs */
    int32_t bf16_products; /* 1: it has dot products of bf16, and this CPU does them faster than products of f32 */
} softdelta_isa_level;

static inline softdelta_isa_level softdelta_isa_level_default(void) {
    softdelta_isa_level l = {sizeof(softdelta_isa_level), NULL, 0, 0, 0, 0};
    return l;
}

/* Levels are counted from 0, each an extension of the one before. Errors: INVALID_ARGUMENT, UNSUPPORTED. */
SOFTDELTA_API int32_t softdelta_isa_level_count(void);
SOFTDELTA_API softdelta_status softdelta_get_isa_level(int32_t index, softdelta_isa_level* level);

typedef enum softdelta_ceiling {
    SOFTDELTA_CEILING_F32 = 0, /* multiply-adds of f32 */
    SOFTDELTA_CEILING_BF16 = 1 /* dot products of bf16 pairs, summed in f32 */
} softdelta_ceiling;

/* What this machine can do at most with the selected level, measured with this many threads at once (0: OpenMP's
 * default), the median of a few runs in about a second. A multiply-add between registers is two floating-point
 * operations; the bandwidth is that of reading memory far larger than the caches (512 MiB or more is allocated for it).
 * Errors: INVALID_ARGUMENT, UNSUPPORTED (no fast kernels; bf16 without an instruction for it), OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_measure_ceiling(int32_t ceiling, int32_t threads, double* flops_per_second);
SOFTDELTA_API softdelta_status softdelta_measure_bandwidth(int32_t threads, double* bytes_per_second);

#ifdef __cplusplus
}
#endif
#endif

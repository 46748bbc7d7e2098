/* softdelta: softmax attention and delta rules, forward and backward, and the convolution and norm around them. The C
 * interface, in one file: who calls it includes one header.
 *
 * Tensors are DLPack views (DLTensor) of memory of the caller, on the CPU or on a device that an engine computes on.
 * Any strides: a stride of 0 broadcasts, null strides mean row-major, byte_offset counts. Types: f64, f32, bf16, f16;
 * masks are bool (DLPack code 6, or 8-bit unsigned); lengths and indices are i32 or i64. Keys and values of attention
 * may be numbers of 8 or 4 bits with scales. Operands of one call may differ in type, but f64 is for the reference and
 * stages engines alone: it is computed by these when they are named, and by the reference also where q, k and v are all
 * f64 (of a layer: x). A null pointer means: not given, or not wanted; a call without any result is refused.
 *
 * Every function checks all arguments before it reads or writes a tensor, and returns a status. After an error
 * softdelta_last_error() says which argument was wrong, what was expected and what was given. Nothing aborts the
 * process.
 *
 * Memory: elements are aligned to their size. A result must not share a byte with an operand, the workspace or another
 * result; such a call is refused. Views of one buffer that interleave are fine, for example q, k and v in one packed
 * tensor. (Views too tangled to decide soon count as sharing.) Exceptions: final_state may be initial_state itself,
 * element for element, and on the CPU y of a layer its x or z.
 *
 * Threads are OpenMP's. A short call stays on the caller's thread, however many threads it may use: one that moves less
 * than about 3 MiB, or does as much arithmetic (docs/performance.md). SOFTDELTA_SHORT_CALL_BYTES in the environment
 * sets another limit; it is read once, and every call fails where it is no number. A process made by fork() after the
 * library was loaded has one thread, because OpenMP's other threads are not copied. exec() gives it all of them again.
 *
 * Structures begin with their size and grow only at the end. Make them with the *_default() functions below. A library
 * reads as much of a structure as it and the caller know; what a newer caller sets beyond is refused, unless it is 0.
 *
 * One file: all that a C program includes, and what bindings of other languages read. */
#ifndef SOFTDELTA_SOFTDELTA_H
#define SOFTDELTA_SOFTDELTA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* DLPack's own header where there is one, since other libraries include it too. */
#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif
#if !defined(DLPACK_DLPACK_H_)
#include <softdelta/detail/dlpack.h>
#endif

/* Before each function of the interface: it is exported from the shared library. */
#if defined(_WIN32)
#define SOFTDELTA_API
#else
#define SOFTDELTA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns. */
typedef enum softdelta_status {
    SOFTDELTA_OK = 0,               /* done */
    SOFTDELTA_INVALID_ARGUMENT = 1, /* the message names argument, expected and actual */
    SOFTDELTA_UNSUPPORTED = 2,      /* legal, but this engine, build or machine cannot do it */
    SOFTDELTA_OUT_OF_MEMORY = 3,    /* scratch memory could not be allocated */
    SOFTDELTA_INTERNAL = 4          /* an error in the library */
} softdelta_status;

/* The message of this thread's last call if it failed, "" if it succeeded. Valid until the thread's next call. */
SOFTDELTA_API const char* softdelta_last_error(void);

/* The version of this header; softdelta_version() returns that of the loaded library. */
#define SOFTDELTA_VERSION_MAJOR 0
/* The version of this header. */
#define SOFTDELTA_VERSION_MINOR 1
/* The version of this header. */
#define SOFTDELTA_VERSION_PATCH 0

/* The version of the loaded library, "major.minor.patch". */
SOFTDELTA_API const char* softdelta_version(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * How to compute */

/* An engine of this library. */
typedef struct softdelta_engine_info {
    size_t size;             /* of this structure */
    const char* name;        /* for execution.engine; lives as long as the library */
    const char* description; /* a few words */
    int32_t device_type;     /* where its tensors lie, a DLDeviceType */
    int32_t fast;      /* 1: made for speed; "fast" and "automatic" take the first such engine that can do the call */
    int32_t available; /* 1: this build and machine can run it */
    int32_t reserved;  /* 0 */
} softdelta_engine_info;

/* With defaults: what is optional is not given. */
static inline softdelta_engine_info softdelta_engine_info_default(void) {
    softdelta_engine_info i = {sizeof(softdelta_engine_info), NULL, NULL, 0, 0, 0, 0};
    return i;
}

/* How many engines there are. */
SOFTDELTA_API int32_t softdelta_engine_count(void);
/* Engine `index`, from 0 on: the fastest comes first. Errors: INVALID_ARGUMENT. */
SOFTDELTA_API softdelta_status softdelta_get_engine(int32_t index, softdelta_engine_info* info);

/* How products of bf16 operands are computed. The product of two bf16 numbers is exact in f32, and sums are kept in
 * f32. The ways differ where a product has computed operands (the probabilities of attention, what a delta rule
 * writes). Dot products of bf16 round these to 8 bits first, as tensor cores do; F32 leaves them as they are. Beside q
 * of bf16, keys and values of 8 or 4 bits are such operands where the level has matrix tiles, if two bf16 hold them. */
typedef enum softdelta_bf16_products {
    SOFTDELTA_BF16_PRODUCTS_AUTOMATIC = 0, /* dot products of bf16 where they exist and are the faster way */
    SOFTDELTA_BF16_PRODUCTS_F32 = 1,       /* as f32, on every machine */
    SOFTDELTA_BF16_PRODUCTS_BF16 = 2       /* dot products of bf16 where they exist */
} softdelta_bf16_products;

/* An intermediate of the stages engines, and a tensor of the caller that receives it. docs/stages.md lists them. */
typedef struct softdelta_stage {
    size_t size;            /* of this structure */
    const char* name;       /* for example "v_new" */
    const DLTensor* tensor; /* of the shape that docs/stages.md gives; any float type */
} softdelta_stage;

/* With defaults: what is optional is not given. */
static inline softdelta_stage softdelta_stage_default(void) {
    softdelta_stage s = {sizeof(softdelta_stage), NULL, NULL};
    return s;
}

/* What the stages engines are told besides. */
typedef struct softdelta_stages {
    size_t size;                   /* of this structure */
    int64_t chunk_size;            /* rows of a chunk or tile: 1, 16, 32, 64 (default), 96, 128 */
    const softdelta_stage* wanted; /* the intermediates wanted: an array of structures of the same size */
    size_t count;                  /* how many */
} softdelta_stages;

/* With defaults: what is optional is not given. */
static inline softdelta_stages softdelta_stages_default(void) {
    softdelta_stages s = {sizeof(softdelta_stages), 64, NULL, 0};
    return s;
}

/* What engines on a GPU are told besides, for delta rules. */
typedef struct softdelta_gpu {
    size_t size;       /* of this structure */
    void* state_ready; /* an event (cudaEvent_t) that is waited for before the call reads initial_state or, going back,
                          dfinal_state. What does not depend on them is computed before. NULL: none */
    void* state_done;  /* an event that is recorded as soon as final_state or dinitial_state are filled; NULL: none */
    void* kept; /* memory on the GPU at a multiple of 256 bytes. A forward pass fills it, and a backward pass of the
                   same inputs and options reads it instead of computing it again. NULL: nothing is kept.
                   softdelta_delta_kept_size returns the size */
    size_t kept_size; /* of kept, in bytes */
} softdelta_gpu;

/* With defaults: what is optional is not given. */
static inline softdelta_gpu softdelta_gpu_default(void) {
    softdelta_gpu g = {sizeof(softdelta_gpu), NULL, NULL, NULL, 0};
    return g;
}

/* The threads of a caller: calls task(task_context, i) once for each i from 0 to count − 1, on any threads, at once or
 * one after the other, and returns when all have returned. */
typedef void (*softdelta_parallel_for)(void* context, int32_t count, void (*task)(void* task_context, int32_t i),
                                       void* task_context);

struct softdelta_rounding; /* softdelta/judge.h */

/* How to compute a call, as opposed to what. Results do not depend on threads and workspace. */
typedef struct softdelta_execution {
    size_t size;        /* of this structure */
    const char* engine; /* the name of an engine (softdelta_get_engine); "fast": the first one made for speed that can
                           do the call; NULL or "automatic": that one, or the reference where q, k and v (x) are
                           f64, or no fast engine is available */
    int32_t threads;    /* an upper limit; 0: OpenMP's default. Both are cut at 16 times the number of processors */
    int32_t bf16_products; /* cpu: a softdelta_bf16_products; automatic */
    void* workspace; /* scratch memory of the caller, where the tensors lie; the call then allocates nothing. NULL:
                        the call allocates. The *_workspace functions return the size. It belongs to one call at
                        a time: another that is given it meanwhile is refused where that is seen */
    size_t workspace_size;               /* of workspace, in bytes */
    softdelta_parallel_for parallel_for; /* the caller's threads instead of OpenMP's, at most `threads` tasks; NULL:
                                            OpenMP's. It may not throw */
    void* parallel_context;              /* the first argument of parallel_for */
    void* stream;                   /* engines on a GPU: the stream that the call works on; NULL: the default one */
    const softdelta_stages* stages; /* of the stages engines; NULL: the defaults */
    const struct softdelta_rounding* rounding; /* for tests of kernels, softdelta/judge.h; NULL: nothing is rounded */
    const softdelta_gpu* gpu;                  /* of engines on a GPU; NULL: the defaults */
} softdelta_execution;

/* With defaults: what is optional is not given. */
static inline softdelta_execution softdelta_execution_default(void) {
    softdelta_execution e = {sizeof(softdelta_execution),
                             NULL,
                             0,
                             SOFTDELTA_BF16_PRODUCTS_AUTOMATIC,
                             NULL,
                             0,
                             NULL,
                             NULL,
                             NULL,
                             NULL,
                             NULL,
                             NULL};
    return e;
}

/* Between calls without a workspace the library keeps at most 128 MiB of scratch memory for the next one. This gives
 * them back to the system. Errors: none. */
SOFTDELTA_API softdelta_status softdelta_release_memory(void);

/* The largest calls that a workspace is for. */
typedef struct softdelta_limits {
    size_t size;       /* of this structure */
    int64_t sequences; /* of a call */
    int64_t tokens;    /* of all sequences of a call together; of attention its queries */
    int64_t keys;      /* attention: of a sequence */
} softdelta_limits;

/* With defaults: a sequence of one token and one key. */
static inline softdelta_limits softdelta_limits_default(void) {
    softdelta_limits l = {sizeof(softdelta_limits), 1, 1, 1};
    return l;
}

/* ---------------------------------------------------------------------------------------------------------------------
 * Softmax attention
 *
 *     s = softcap(scale · q kᵀ) + bias,   p = softmax of s over the allowed keys,   o = p v,   lse = log Σ exp s
 *
 * With slopes, bias is bias_slope·bias − alibi_slope·|i + Lk − Lq − j|. B batch, Lq Lk lengths, H query heads, Hk
 * key/value heads, D Dv head dimensions, N packed sequences. H is a multiple of Hk: query head h reads key head h /
 * (H/Hk). After Dao (FlashAttention), Shazeer (MQA), Ainslie (GQA). */

/* Which keys a query sees by its position. */
typedef enum softdelta_causal {
    SOFTDELTA_CAUSAL_NONE = 0,        /* all */
    SOFTDELTA_CAUSAL_TOP_LEFT = 1,    /* query i sees keys j ≤ i */
    SOFTDELTA_CAUSAL_BOTTOM_RIGHT = 2 /* query i sees keys j ≤ i + Lk − Lq */
} softdelta_causal;

/* The lse of a row that sees no key and has no sink. Its o is 0. */
typedef enum softdelta_empty_row {
    SOFTDELTA_EMPTY_ROW_MINUS_INFINITY = 0, /* the logarithm of an empty sum */
    SOFTDELTA_EMPTY_ROW_PLUS_INFINITY = 1,  /* as some kernels store it, so that exp(s − lse) is 0 */
    SOFTDELTA_EMPTY_ROW_ZERO = 2            /* 0 */
} softdelta_empty_row;

/* The tensors that attention reads. q, k and v are required. */
typedef struct softdelta_attention_inputs {
    size_t size;          /* of this structure */
    const DLTensor* q;    /* [B, Lq, H, D];  packed [1, ΣLq, H, D] */
    const DLTensor* k;    /* [B, Lk, Hk, D]; packed [1, ΣLk, Hk, D]; paged [blocks, block rows, Hk, D] */
    const DLTensor* v;    /* as k with Dv; may be a view into k */
    const DLTensor* mask; /* bool [B|1, H|Hk|1, Lq|1, Lk|1], true keeps; packed [N|1, H|Hk|1, max Lq|1, max Lk|1];
                             for a cache Lk is the number of keys that fit */
    const DLTensor* bias; /* float, shaped as mask; added to the scaled scores; −∞ masks */
    const DLTensor* sink; /* [H] a logit that joins the softmax sum and has no value row */
    const DLTensor* cu_seqlens_q;  /* [N+1] where packed sequences of queries begin: first 0, ascending, last ΣLq */
    const DLTensor* cu_seqlens_k;  /* [N+1] the same for keys */
    const DLTensor* cache_seqlens; /* [B] keys in use of each batch row, the new ones included, at most as many as fit:
                                      size 1 of k, or max blocks × block rows. Causal and window take them for Lk.
                                      Without offsets each query sees a key: 1 or more, for bottom-right as many as
                                      queries. (Lengths on a device are not checked.) With cu_seqlens_q and
                                      without cu_seqlens_k it is [N]: the queries of sequence n are packed, its keys lie
                                      in row n of caches k [N, Lk, Hk, D], or in blocks (prefill and decode in one
                                      batch) */
    const DLTensor* block_table; /* [B, max blocks], with cu_seqlens_q [N, max blocks]; needs cache_seqlens. Key j of a
                                    sequence is row j mod rows of block block_table[·, j / rows] */
    const DLTensor* alibi_slopes; /* [H] adds −slope·|i + Lk − Lq − j| to the score of query i and key j, also where
                                     causal is top-left (ALiBi, Press et al. 2022) */
    const DLTensor* bias_slopes; /* [H] multiplies bias, one number for each query head; −∞ masks whatever the slope */
    const DLTensor*
        k_scale; /* with k of 8 or 4 bits, without gradients: [B|1, Lk|1, Hk|1, D/32|1], dimensions 0 to 2 as k.
                    k is i8 or f8 e4m3 (DLPack code 10) [.., D] with one scale, [.., 1]; or in blocks of 32
                    that have a scale each, [.., D/32]: i8 or f8 [.., D/32, 32] (ggml's q8_0), or 4 bits in
                    bytes, u8 [.., D/32, 16]: byte b holds element b in its low half and element b + 16 in
                    its high half, each plus 8 (ggml's q4_0). Paged k has scales [blocks, block rows, ..] */
    const DLTensor* v_scale; /* the same of v */
} softdelta_attention_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_attention_inputs softdelta_attention_inputs_default(void) {
    softdelta_attention_inputs i = {sizeof(softdelta_attention_inputs),
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL};
    return i;
}

/* Options of attention. */
typedef struct softdelta_attention_options {
    size_t size;    /* of this structure */
    double scale;   /* NaN (default): D^-1/2; f32 can hold it */
    int32_t causal; /* a softdelta_causal; none */
    int64_t window_left; /* −1 (default): unbounded; query i sees keys from i + Lk − Lq − left (top-left: i − left) */
    int64_t window_right; /* −1 (default): unbounded; up to i + Lk − Lq + right (top-left: i + right) */
    double softcap; /* 0 (default): off; else c·tanh(x/c) of the scaled scores, before the bias; f32 can hold scale/c */
    int32_t empty_row;    /* a softdelta_empty_row; −∞ */
    int64_t top_w;        /* −1 (default): off; else each row keeps the top_w largest biases among its allowed
                             keys, slopes applied, on a tie the lower index (dynamic mask attention, Shi et al. 2025) */
    int64_t query_offset; /* 0 (default); a call with some rows of a longer one: causal and window take query i for
                             i + query_offset, … */
    int64_t key_offset;   /* … and key j for j + key_offset. mask and bias are those of the rows and keys given; there
                             are no alibi_slopes with offsets */
} softdelta_attention_options;

/* With defaults: what is optional is not given. */
static inline softdelta_attention_options softdelta_attention_options_default(void) {
    softdelta_attention_options o = {sizeof(softdelta_attention_options),
                                     NAN,
                                     SOFTDELTA_CAUSAL_NONE,
                                     -1,
                                     -1,
                                     0,
                                     SOFTDELTA_EMPTY_ROW_MINUS_INFINITY,
                                     -1,
                                     0,
                                     0};
    return o;
}

/* Results of the forward pass; those that are given are written. */
typedef struct softdelta_attention_outputs {
    size_t size;   /* of this structure */
    DLTensor* o;   /* [B, Lq, H, Dv]; on matrix tiles the bits of bf16 depend on whether lse is given */
    DLTensor* lse; /* [B, H, Lq], packed [1, H, ΣLq]; natural logarithm, sink included */
} softdelta_attention_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_attention_outputs softdelta_attention_outputs_default(void) {
    softdelta_attention_outputs s = {sizeof(softdelta_attention_outputs), NULL, NULL};
    return s;
}

/* Gradients of a loss, from the gradients of o and, if the loss uses it, of lse. Any subset may be wanted. A row
 * without an allowed key has gradient 0. Sums over the heads of a group and over broadcast dimensions of bias run in a
 * fixed order. */
typedef struct softdelta_attention_gradients {
    size_t size;          /* of this structure */
    const DLTensor* o;    /* saved from the forward call; optional */
    const DLTensor* lse;  /* saved from the forward call; optional */
    const DLTensor* d_o;  /* [B, Lq, H, Dv]; required */
    const DLTensor* dlse; /* [B, H, Lq]; optional */
    DLTensor* dq;         /* as q */
    DLTensor* dk;         /* as k */
    DLTensor* dv;         /* as v */
    DLTensor* dbias;      /* as bias */
    DLTensor* dsink;      /* as sink */
} softdelta_attention_gradients;

/* With defaults: what is optional is not given. */
static inline softdelta_attention_gradients softdelta_attention_gradients_default(void) {
    softdelta_attention_gradients s = {
        sizeof(softdelta_attention_gradients), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return s;
}

/* The forward pass. options and execution may be NULL: the defaults. Errors: INVALID_ARGUMENT, UNSUPPORTED,
 * OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_attention_forward(const softdelta_attention_inputs* inputs,
                                                           const softdelta_attention_outputs* outputs,
                                                           const softdelta_attention_options* options,
                                                           const softdelta_execution* execution);
/* The backward pass. Errors: as the forward pass; UNSUPPORTED also for gradients with a block table, and for keys or
 * values with scales. */
SOFTDELTA_API softdelta_status softdelta_attention_backward(const softdelta_attention_inputs* inputs,
                                                            const softdelta_attention_gradients* gradients,
                                                            const softdelta_attention_options* options,
                                                            const softdelta_execution* execution);

/* Returns how many bytes of execution.workspace the same call needs on the selected instruction set; 0 for engines that
 * need none. Fewer threads may need more: where threads is 0, OpenMP's default must stay, and a forked process asks
 * anew. Checks all arguments. Reads no tensor but lengths, and writes none. */
SOFTDELTA_API softdelta_status softdelta_attention_forward_workspace(const softdelta_attention_inputs* inputs,
                                                                     const softdelta_attention_outputs* outputs,
                                                                     const softdelta_attention_options* options,
                                                                     const softdelta_execution* execution,
                                                                     size_t* bytes);
/* Returns how many bytes are enough for every forward pass within these limits, in any cut into sequences, by as many
 * threads or fewer. It grows with each limit. Of inputs heads, channels and types count: q [1, 0, H, D], k, v [1, 0,
 * Hk, ·], k_scale and v_scale without memory will do. Of options top_w counts. Errors: UNSUPPORTED for engines on a
 * GPU. */
SOFTDELTA_API softdelta_status softdelta_attention_forward_workspace_bound(const softdelta_attention_inputs* inputs,
                                                                           const softdelta_limits* limits,
                                                                           const softdelta_attention_options* options,
                                                                           const softdelta_execution* execution,
                                                                           size_t* bytes);
/* The same for the backward pass. */
SOFTDELTA_API softdelta_status softdelta_attention_backward_workspace(const softdelta_attention_inputs* inputs,
                                                                      const softdelta_attention_gradients* gradients,
                                                                      const softdelta_attention_options* options,
                                                                      const softdelta_execution* execution,
                                                                      size_t* bytes);

/* A forward pass that is checked and prepared once, and runs for many layers: they differ in the memory of their
 * tensors alone, as those of one step of a server do. Results have the bits of softdelta_attention_forward. A plan is
 * for one call at a time, and for engine "cpu". */
typedef struct softdelta_attention_plan softdelta_attention_plan;

/* Makes a plan of this call, one layer's, and computes nothing. The plan keeps its shapes, strides, types, options,
 * execution and instruction set, a copy of its lengths and block table, and its scratch memory: execution.workspace,
 * which belongs to the plan as long as that lives, or memory of its own. Errors: as the forward pass; UNSUPPORTED also
 * for other engines. */
SOFTDELTA_API softdelta_status softdelta_attention_plan_create(const softdelta_attention_inputs* inputs,
                                                               const softdelta_attention_outputs* outputs,
                                                               const softdelta_attention_options* options,
                                                               const softdelta_execution* execution,
                                                               softdelta_attention_plan** plan);
/* The forward pass of a layer. Its tensors have shape, type and strides of the plan's, and lie anywhere. Lengths and
 * block table are the plan's: the call gives none. Allocates nothing. Errors: INVALID_ARGUMENT, also for a plan that
 * another call uses, or that was made before a fork. */
SOFTDELTA_API softdelta_status softdelta_attention_plan_forward(softdelta_attention_plan* plan,
                                                                const softdelta_attention_inputs* inputs,
                                                                const softdelta_attention_outputs* outputs);
/* Ends a plan that no call uses; NULL: nothing. */
SOFTDELTA_API void softdelta_attention_plan_destroy(softdelta_attention_plan* plan);

/* Keys and values of new tokens, for the cache that attention reads. All are required but cu_seqlens and block_table.
 */
typedef struct softdelta_cache_append_inputs {
    size_t size;                   /* of this structure */
    const DLTensor* k;             /* [B, L, Hk, D]; packed [1, ΣL, Hk, D] */
    const DLTensor* v;             /* as k with Dv */
    const DLTensor* cu_seqlens;    /* [N+1] where packed sequences begin: first 0, ascending, last ΣL */
    const DLTensor* cache_seqlens; /* [N] keys in use, the new ones included, as the attention call that follows has it:
                                      new key i of L becomes key cache_seqlens[n] − L + i of sequence n */
    const DLTensor* block_table;   /* [N, max blocks], as attention's */
} softdelta_cache_append_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_cache_append_inputs softdelta_cache_append_inputs_default(void) {
    softdelta_cache_append_inputs s = {sizeof(softdelta_cache_append_inputs), NULL, NULL, NULL, NULL, NULL};
    return s;
}

/* The cache, as attention reads it. */
typedef struct softdelta_cache_append_outputs {
    size_t size;       /* of this structure */
    DLTensor* k_cache; /* [N, Lk, Hk, D] or [blocks, block rows, Hk, D]; f32, bf16, f16 or numbers of 8 or 4 bits, as k
                          of attention */
    DLTensor* v_cache; /* the same of v */
    DLTensor* k_scale; /* with numbers of 8 or 4 bits, as k_scale of attention. Scales that rows have for themselves are
                          written: the largest number of a row or block becomes 127, −8 or 448 of them. Scales that
                          serve many rows (fewer than the cache has) are read; numbers beyond them become the largest */
    DLTensor* v_scale; /* the same of v */
} softdelta_cache_append_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_cache_append_outputs softdelta_cache_append_outputs_default(void) {
    softdelta_cache_append_outputs s = {sizeof(softdelta_cache_append_outputs), NULL, NULL, NULL, NULL};
    return s;
}

/* Writes new keys and values behind those in use. Other rows keep their bytes. Of execution threads and parallel_for
 * count. A row with a number that is not finite has the scale NaN. Tensors lie on the CPU. Errors: INVALID_ARGUMENT,
 * UNSUPPORTED, OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_cache_append(const softdelta_cache_append_inputs* inputs,
                                                      const softdelta_cache_append_outputs* outputs,
                                                      const softdelta_execution* execution);

/* ---------------------------------------------------------------------------------------------------------------------
 * Delta rules: a state S [K, V] per value head, token by token; g is a natural logarithm
 *
 *     delta_rule         S ← S + k (β (v − Sᵀk))ᵀ                                   Yang et al. 2024 (DeltaNet)
 *     gated_delta_rule   S ← e^g S, then as above; g per head                       Yang et al. 2025 (Gated DeltaNet)
 *     kda                S ← diag(e^g) S, then as above; g per key channel          Kimi Linear 2025
 *     comba              d = β (v − Sᵀp), S ← e^g S + k dᵀ                           Hu et al. 2025
 *     simple_gla         S ← e^g S + k vᵀ                                           Qin et al., Sun et al. (retention)
 *     gla                S ← diag(e^g) S + k vᵀ                                     Yang et al. 2024 (GLA)
 *     gdn2               S ← diag(e^g) S, S ← S + k (β (v − Sᵀp))ᵀ                   Gated DeltaNet-2
 *     gated_delta_product  as gated_delta_rule, the gate is optional                Siems et al. 2025 (DeltaProduct)
 *     dplr               d = β (v − Sᵀp), S ← diag(e^g) S + k dᵀ                      RWKV-7 with two steps
 *     o = scale · Sᵀ q after the update
 *
 * A token may have n > 1 steps (options.steps), each a row of k, v, p and beta: nT = n·T. It is gated in its first step
 * and read after its last. DPLR's S ← diag(e^g) S + b (aᵀS) + k vᵀ has two: k = b, p = −a, v = 0; then k, v and p = 0.
 *
 * B batch, T tokens, H query/key heads, HV value heads, K V head dimensions, N sequences. HV is a multiple of H: value
 * head h reads key head h / (HV/H), or h mod H by option head_order. Every finite g is legal, and −∞ wipes the state:
 * results are finite wherever all states and outputs fit f32. T = 0, beta = 0 and k = 0 are legal. */

/* The rules of the table above. */
typedef enum softdelta_rule {
    SOFTDELTA_RULE_DELTA = 0,               /* no gate */
    SOFTDELTA_RULE_GATED_DELTA = 1,         /* a gate per head */
    SOFTDELTA_RULE_KDA = 2,                 /* a gate per key channel */
    SOFTDELTA_RULE_COMBA = 3,               /* a gate per head; erases along p, from the state before its decay */
    SOFTDELTA_RULE_SIMPLE_GLA = 4,          /* a gate per head; erases nothing */
    SOFTDELTA_RULE_GLA = 5,                 /* a gate per key channel; erases nothing */
    SOFTDELTA_RULE_GDN2 = 6,                /* a gate per key channel; erases along p */
    SOFTDELTA_RULE_GATED_DELTA_PRODUCT = 7, /* a gate per head or none, meant for several steps */
    SOFTDELTA_RULE_DPLR = 8 /* a gate per key channel; erases along p, from the state before its decay */
} softdelta_rule;

/* Whether a rule has a gate. */
typedef enum softdelta_rule_gate {
    SOFTDELTA_GATE_NONE = 0,
    SOFTDELTA_GATE_HEAD = 1,   /* a number for each value head */
    SOFTDELTA_GATE_CHANNEL = 2 /* one for each of its key channels, too */
} softdelta_rule_gate;
/* What a rule erases before it writes, and from which state. */
typedef enum softdelta_rule_erases {
    SOFTDELTA_ERASES_FROM_DECAYED_STATE = 0,  /* S ← decayed S, then S ← S + k (β (v − Sᵀp))ᵀ */
    SOFTDELTA_ERASES_FROM_PREVIOUS_STATE = 1, /* d = β (v − Sᵀp), then S ← decayed S + k dᵀ */
    SOFTDELTA_ERASES_NOTHING = 2              /* S ← decayed S + k vᵀ */
} softdelta_rule_erases;

/* options.rule by facts, a rule of the table or any other: gate a softdelta_rule_gate, erases a softdelta_rule_erases;
 * -1, which every call refuses, for other numbers. own_p: 1 erases along p, 0 along k; 0 where nothing is erased. A
 * gate requires g; a gate per head may be g_gamma or missing where nothing is erased. */
static inline int32_t softdelta_rule_of_facts(int32_t gate, int32_t erases, int own_p) {
    if (gate < SOFTDELTA_GATE_NONE || gate > SOFTDELTA_GATE_CHANNEL) return -1;
    if (erases < SOFTDELTA_ERASES_FROM_DECAYED_STATE || erases > SOFTDELTA_ERASES_NOTHING) return -1;
    return 256 + gate + 4 * erases + 16 * (own_p != 0);
}

/* Which of H key heads value head h reads. */
typedef enum softdelta_head_order {
    SOFTDELTA_HEAD_ORDER_GROUPED = 0, /* h / (HV/H): value heads of a key head are neighbours */
    SOFTDELTA_HEAD_ORDER_TILED = 1    /* h mod H, as ggml has it */
} softdelta_head_order;

/* The tensors that a delta rule reads. q, k and v are required. So is g where a rule has a gate; simple_gla and
 * gated_delta_product go without it, too. So is p for comba, gdn2 and dplr. "Channel gate": kda, gla, gdn2, dplr. Rules
 * by their facts take the same. */
typedef struct softdelta_delta_inputs {
    size_t size;                   /* of this structure */
    const DLTensor* q;             /* [B, T, H, K] */
    const DLTensor* k;             /* [B, nT, H, K] */
    const DLTensor* v;             /* [B, nT, HV, V] */
    const DLTensor* g;             /* [B, T, HV], channel gate [B, T, HV, K] */
    const DLTensor* g_gamma;       /* [HV] simple_gla: a constant gate instead of g */
    const DLTensor* beta;          /* [B, nT, HV]; default 1; none for simple_gla and gla */
    const DLTensor* p;             /* [B, nT, H, K] */
    const DLTensor* initial_state; /* [N, HV, K, V] or, by option, [N, HV, V, K]; default 0 */
    const DLTensor* A_log;         /* [HV] with use_gate_in_kernel; optional with a lower bound */
    const DLTensor* dt_bias;       /* [HV], channel gate [HV*K] with use_gate_in_kernel; default 0 */
    const DLTensor* cu_seqlens;    /* [N+1] where packed sequences begin, B = 1: first 0, ascending, last T */
    const DLTensor* state_indices; /* [N] sequence n uses entry state_indices[n] of a pool [pool, HV, K, V] of states.
                                      −1: no sequence (padding); o is 0, no state is read or written */
    const DLTensor* final_state_indices; /* [N] the final state goes to this entry instead; −1: it is not written.
                                            Sequences may then begin from the same entry, but none from one that
                                            another sequence writes */
    const DLTensor* has_initial_state;   /* [N] bool; false: sequence n begins from 0, whatever its entry holds */
    const DLTensor* snapshot_indices;    /* [B, NT], with final_state: of each state that `states` would return, the
                                            entry of final_state's pool that it goes to; −1: none. So a prefix cache
                                            keeps states at multiples of state_interval */
} softdelta_delta_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_inputs softdelta_delta_inputs_default(void) {
    softdelta_delta_inputs i = {sizeof(softdelta_delta_inputs),
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL,
                                NULL};
    return i;
}

/* Options of a delta rule. */
typedef struct softdelta_delta_options {
    size_t size;                     /* of this structure */
    int32_t rule;                    /* a softdelta_rule, or softdelta_rule_of_facts(…) */
    double scale;                    /* NaN (default): K^-1/2; f32 can hold it */
    int32_t use_qk_l2norm_in_kernel; /* 1: q, k, p ← x / √(Σx² + 1e-6) */
    int32_t use_gate_in_kernel; /* 1: g is raw; the gate is −e^A_log · softplus(g + dt_bias), or see lower_bound */
    double lower_bound; /* 0 or negative: the gate is lower_bound · σ(e^A_log · (g + dt_bias)) instead; NaN (default):
                           softplus */
    int32_t use_beta_sigmoid_in_kernel; /* 1: beta is a logit; σ(beta) is used */
    int32_t allow_neg_eigval;           /* 1: 2σ(beta) is used; changes nothing without use_beta_sigmoid_in_kernel */
    int32_t state_v_first;              /* 1: states are [.., V, K] */
    int64_t state_interval;             /* tokens between the states returned in `states`; 64 */
    int32_t head_order;                 /* a softdelta_head_order; grouped */
    int32_t steps;                      /* n, 1 to 64; 1 (so is 0) */
} softdelta_delta_options;

/* With defaults, for a softdelta_rule or softdelta_rule_of_facts(…). */
static inline softdelta_delta_options softdelta_delta_options_default(int32_t rule) {
    softdelta_delta_options o = {sizeof(softdelta_delta_options), 0, NAN, 0, 0, NAN, 0, 0, 0, 64,
                                 SOFTDELTA_HEAD_ORDER_GROUPED,    1};
    o.rule = rule;
    return o;
}

/* Results of the forward pass; those that are given are written. */
typedef struct softdelta_delta_outputs {
    size_t size;           /* of this structure */
    DLTensor* o;           /* [B, T, HV, V] */
    DLTensor* final_state; /* [N, HV, K, V] or [N, HV, V, K]; may be initial_state itself (decode in place) */
    DLTensor* states; /* [B, NT, HV, K, V] or [.., V, K]: the state before token 0, state_interval, 2·state_interval, …
                         of each sequence; NT = Σ ceil(T_n / state_interval) */
    DLTensor* u;      /* [B, nT, HV, V]: what each step writes, S_t = decayed S_(t−1) + k_t u_tᵀ. Given
                         `states` and u, a backward pass need not sweep forward. Engines reference and cpu */
} softdelta_delta_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_outputs softdelta_delta_outputs_default(void) {
    softdelta_delta_outputs s = {sizeof(softdelta_delta_outputs), NULL, NULL, NULL, NULL};
    return s;
}

/* Gradients of a loss, from the gradient of o, of final_state or of both. Any subset may be wanted. With HV > H, dq, dk
 * and dp are sums over the group, in a fixed order. */
typedef struct softdelta_delta_gradients {
    size_t size;                  /* of this structure */
    const DLTensor* d_o;          /* [B, T, HV, V] */
    const DLTensor* dfinal_state; /* as final_state; default 0 */
    DLTensor* dq;                 /* as q */
    DLTensor* dk;                 /* as k */
    DLTensor* dv;                 /* as v */
    DLTensor* dg;                 /* as g */
    DLTensor* dg_gamma;           /* as g_gamma */
    DLTensor* dbeta;              /* as beta */
    DLTensor* dp;                 /* as p */
    DLTensor* dinitial_state;     /* as final_state; also without an initial_state */
    DLTensor* dA_log;             /* as A_log */
    DLTensor* ddt_bias;           /* as dt_bias */
    const DLTensor* states;       /* of the forward pass, with the same state_interval, */
    const DLTensor* u;            /* and its u: both or none. What is given here is not computed again; an engine may
                                     ignore it. cpu reads it where state_interval is at most 512; 384 is best */
} softdelta_delta_gradients;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_gradients softdelta_delta_gradients_default(void) {
    softdelta_delta_gradients s = {sizeof(softdelta_delta_gradients),
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL};
    return s;
}

/* The forward pass. options are required, since they name the rule; execution may be NULL: the defaults. Decode is this
 * call with T = 1 or a few, the same pool as initial_state and final_state, and state_indices. Errors:
 * INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_delta_forward(const softdelta_delta_inputs* inputs,
                                                       const softdelta_delta_outputs* outputs,
                                                       const softdelta_delta_options* options,
                                                       const softdelta_execution* execution);
/* The backward pass. Errors: as the forward pass. */
SOFTDELTA_API softdelta_status softdelta_delta_backward(const softdelta_delta_inputs* inputs,
                                                        const softdelta_delta_gradients* gradients,
                                                        const softdelta_delta_options* options,
                                                        const softdelta_execution* execution);

/* Returns how many bytes of execution.workspace the same call needs, as for attention. */
SOFTDELTA_API softdelta_status softdelta_delta_forward_workspace(const softdelta_delta_inputs* inputs,
                                                                 const softdelta_delta_outputs* outputs,
                                                                 const softdelta_delta_options* options,
                                                                 const softdelta_execution* execution, size_t* bytes);
/* Returns how many bytes are enough for every forward pass within these limits, as for attention. q, k, v and what the
 * rule needs may have 0 tokens and no memory. */
SOFTDELTA_API softdelta_status softdelta_delta_forward_workspace_bound(const softdelta_delta_inputs* inputs,
                                                                       const softdelta_limits* limits,
                                                                       const softdelta_delta_options* options,
                                                                       const softdelta_execution* execution,
                                                                       size_t* bytes);
/* The same for the backward pass. */
SOFTDELTA_API softdelta_status softdelta_delta_backward_workspace(const softdelta_delta_inputs* inputs,
                                                                  const softdelta_delta_gradients* gradients,
                                                                  const softdelta_delta_options* options,
                                                                  const softdelta_execution* execution, size_t* bytes);

/* Returns how many bytes of execution.gpu->kept a call with these inputs and options fills; 0: nothing can be kept of
 * it. They grow with tokens and value heads: for each token and value head about 1.8 KB of kda, 1.1 KB of the other
 * rules. Gradients are equally right with and without, but may differ in their last bits. */
SOFTDELTA_API softdelta_status softdelta_delta_kept_size(const softdelta_delta_inputs* inputs,
                                                         const softdelta_delta_options* options,
                                                         const softdelta_execution* execution, size_t* bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * Between ranges of tokens, for calls that many processes share. Nothing here communicates: summaries and states are
 * tensors that any transport can carry (docs/distributed.md)
 *
 * For a head, a range of tokens is an affine map of the state that enters it, and backward of the gradient of the state
 * that leaves it:
 *
 *     S_out = M S_in + E,   dS_in = Mᵀ dS_out + R
 *
 * P ranges in a row. A range without tokens has M = 1, E = 0. */

/* What a range does to a state; those that are given are written. */
typedef struct softdelta_delta_summary_outputs {
    size_t size; /* of this structure */
    DLTensor* M; /* [N, HV, K, K], whatever the layout of states; simple_gla: [N, HV], a number for each head */
    DLTensor* E; /* [N, HV, K, V] or [N, HV, V, K]: the state that leaves after 0 entered */
} softdelta_delta_summary_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_summary_outputs softdelta_delta_summary_outputs_default(void) {
    softdelta_delta_summary_outputs s = {sizeof(softdelta_delta_summary_outputs), NULL, NULL};
    return s;
}

/* What a range does to the gradient of a state. */
typedef struct softdelta_delta_summary_gradients {
    size_t size;         /* of this structure */
    const DLTensor* d_o; /* [B, T, HV, V]; required */
    DLTensor* R;         /* as E: the gradient of the state that enters, where that of the one that leaves is 0 */
} softdelta_delta_summary_gradients;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_summary_gradients softdelta_delta_summary_gradients_default(void) {
    softdelta_delta_summary_gradients s = {sizeof(softdelta_delta_summary_gradients), NULL, NULL};
    return s;
}

/* The summary of a range: as the forward pass, without its o. inputs.initial_state and state_indices must not be given,
 * for a summary holds for every state that enters; execution.workspace and stages neither. M and E cost a scan of K and
 * one of V columns. Tensors lie on the CPU. Errors: as the forward pass. */
SOFTDELTA_API softdelta_status softdelta_delta_summary(const softdelta_delta_inputs* inputs,
                                                       const softdelta_delta_summary_outputs* outputs,
                                                       const softdelta_delta_options* options,
                                                       const softdelta_execution* execution);
/* Its gradient R. It does not depend on v, of which only the shape and type count. Errors: as the backward pass. */
SOFTDELTA_API softdelta_status softdelta_delta_summary_backward(const softdelta_delta_inputs* inputs,
                                                                const softdelta_delta_summary_gradients* gradients,
                                                                const softdelta_delta_options* options,
                                                                const softdelta_execution* execution);

/* Summaries of P ranges in the order of tokens; M and E are required. */
typedef struct softdelta_delta_fold_inputs {
    size_t size;                   /* of this structure */
    const DLTensor* M;             /* [P, N, HV, K, K]; simple_gla [P, N, HV] */
    const DLTensor* E;             /* [P, N, HV, K, V] or, by option, [P, N, HV, V, K] */
    const DLTensor* initial_state; /* [N, HV, K, V] or [N, HV, V, K]: enters the first range; default 0 */
} softdelta_delta_fold_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_fold_inputs softdelta_delta_fold_inputs_default(void) {
    softdelta_delta_fold_inputs s = {sizeof(softdelta_delta_fold_inputs), NULL, NULL, NULL};
    return s;
}

/* Results of a fold; those that are given are written. */
typedef struct softdelta_delta_fold_outputs {
    size_t size;           /* of this structure */
    DLTensor* states;      /* as E: the state that enters each range */
    DLTensor* final_state; /* as initial_state: the state that leaves the last one */
} softdelta_delta_fold_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_delta_fold_outputs softdelta_delta_fold_outputs_default(void) {
    softdelta_delta_fold_outputs s = {sizeof(softdelta_delta_fold_outputs), NULL, NULL};
    return s;
}

/* The states between ranges: states[0] = initial_state, states[r + 1] = M[r] states[r] + E[r]. Of the options only rule
 * and state_v_first count, of execution only threads. Sums run in the order of ranges and are kept in f32, with an f64
 * input in f64. A 0 in M forgets what it multiplies, as a gate of −∞ does. Tensors lie on the CPU. Errors:
 * INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_delta_fold(const softdelta_delta_fold_inputs* inputs,
                                                    const softdelta_delta_fold_outputs* outputs,
                                                    const softdelta_delta_options* options,
                                                    const softdelta_execution* execution);
/* The same for gradients, from the last range to the first: inputs.E holds R, inputs.initial_state the gradient of the
 * state that leaves the last range. outputs.states[r] is the gradient of the state that leaves range r:
 * states[r − 1] = M[r]ᵀ states[r] + R[r]. outputs.final_state is that of the state that enters the first. Errors: as
 * the fold. */
SOFTDELTA_API softdelta_status softdelta_delta_fold_backward(const softdelta_delta_fold_inputs* inputs,
                                                             const softdelta_delta_fold_outputs* outputs,
                                                             const softdelta_delta_options* options,
                                                             const softdelta_execution* execution);

/* Attention over each of several disjoint sets of keys; o and lse are required. */
typedef struct softdelta_attention_merge_inputs {
    size_t size;                /* of this structure */
    const DLTensor* const* o;   /* o[r] [B, Lq, H, Dv] for r below count, of float types */
    const DLTensor* const* lse; /* lse[r] [B, H, Lq] */
    int64_t count;              /* 1 to 2^20 */
} softdelta_attention_merge_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_attention_merge_inputs softdelta_attention_merge_inputs_default(void) {
    softdelta_attention_merge_inputs s = {sizeof(softdelta_attention_merge_inputs), NULL, NULL, 0};
    return s;
}

/* Attention over disjoint sets of keys, each computed for itself, put together in the order given:
 *
 *     lse = log Σ_r e^lse_r,   o = Σ_r e^(lse_r − lse) o_r
 *
 * A row without a key has lse_r = −∞ (SOFTDELTA_EMPTY_ROW_MINUS_INFINITY); without one in any set its o is 0 and its
 * lse −∞. A sink joins one of the sets. Sums are kept in f32, with an f64 o in f64. The error of an lse is the relative
 * error of its share: f32 tells shares to 6e-5 at |lse| = 1024. Of execution only threads count. Tensors lie on the
 * CPU. Errors: INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY. After Dao et al. (FlashAttention), Liu et al. (ring
 * attention). */
SOFTDELTA_API softdelta_status softdelta_attention_merge(const softdelta_attention_merge_inputs* inputs,
                                                         const softdelta_attention_outputs* outputs,
                                                         const softdelta_execution* execution);

/* ---------------------------------------------------------------------------------------------------------------------
 * Around the rules: what every layer with a delta rule has before and after it */

/* What is applied to a result, or to a gate. */
typedef enum softdelta_activation {
    SOFTDELTA_ACTIVATION_NONE = 0,   /* x; of a gate: there is none */
    SOFTDELTA_ACTIVATION_SILU = 1,   /* x·σ(x), also called swish */
    SOFTDELTA_ACTIVATION_SIGMOID = 2 /* σ(x); gates alone */
} softdelta_activation;

/* The causal convolution of each channel by itself, with a state
 *
 *     y_t = act(bias + Σ_{i<W} weight_i · x_{t−W+1+i})
 *
 * B batch, T tokens, C channels, W width of the convolution, N sequences, S tokens of a state. Tokens before the first
 * of a sequence are those of its state, or zeros. Sequences that are packed do not see each other. The kernels of
 * engine "cpu" are for W ≤ 8; the reference, when it is named, takes any. Channels are best innermost in memory. A
 * token that is not finite changes no result before it. */

/* The tensors that the convolution reads. x and weight are required. */
typedef struct softdelta_causal_convolution_inputs {
    size_t size;            /* of this structure */
    const DLTensor* x;      /* [B, T, C] */
    const DLTensor* weight; /* [C, W]; weight_{W−1} is the newest token's */
    const DLTensor* bias;   /* [C]; default 0 */
    const DLTensor*
        initial_state; /* [N, C, S], S ≥ W − 1: the tokens before the first one, the newest last; default 0 */
    const DLTensor* cu_seqlens;    /* [N+1] where packed sequences begin, B = 1: first 0, ascending, last T */
    const DLTensor* state_indices; /* [N] sequence n uses entry state_indices[n] of a pool [pool, C, S] of states; −1:
                                      no sequence (padding); y is 0, no state is read or written */
    const DLTensor* final_state_indices; /* [N] as for delta rules */
    const DLTensor* has_initial_state;   /* [N] bool, the same */
} softdelta_causal_convolution_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_causal_convolution_inputs softdelta_causal_convolution_inputs_default(void) {
    softdelta_causal_convolution_inputs i = {
        sizeof(softdelta_causal_convolution_inputs), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return i;
}

/* Options of the convolution. */
typedef struct softdelta_causal_convolution_options {
    size_t size;        /* of this structure */
    int32_t activation; /* a softdelta_activation, none (default) or silu */
    int32_t reserved;   /* 0 */
} softdelta_causal_convolution_options;

/* With defaults: what is optional is not given. */
static inline softdelta_causal_convolution_options softdelta_causal_convolution_options_default(void) {
    softdelta_causal_convolution_options o = {sizeof(softdelta_causal_convolution_options), SOFTDELTA_ACTIVATION_NONE,
                                              0};
    return o;
}

/* Results of the forward pass; those that are given are written. */
typedef struct softdelta_causal_convolution_outputs {
    size_t size;           /* of this structure */
    DLTensor* y;           /* [B, T, C]; may be x itself */
    DLTensor* final_state; /* [N, C, S], S ≥ W − 1: the last S tokens, those of the initial state among them; may be
                              initial_state itself */
} softdelta_causal_convolution_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_causal_convolution_outputs softdelta_causal_convolution_outputs_default(void) {
    softdelta_causal_convolution_outputs s = {sizeof(softdelta_causal_convolution_outputs), NULL, NULL};
    return s;
}

/* Gradients of a loss, from the gradient of y, of final_state or of both. Any subset may be wanted. Sums over tokens
 * run in an order that shapes fix. */
typedef struct softdelta_causal_convolution_gradients {
    size_t size;                  /* of this structure */
    const DLTensor* dy;           /* [B, T, C]; default 0 */
    const DLTensor* dfinal_state; /* [N, C, S]; default 0 */
    DLTensor* dx;                 /* as x */
    DLTensor* dweight;            /* as weight */
    DLTensor* dbias;              /* as bias */
    DLTensor* dinitial_state;     /* [N, C, S]; also without an initial_state */
} softdelta_causal_convolution_gradients;

/* With defaults: what is optional is not given. */
static inline softdelta_causal_convolution_gradients softdelta_causal_convolution_gradients_default(void) {
    softdelta_causal_convolution_gradients s = {
        sizeof(softdelta_causal_convolution_gradients), NULL, NULL, NULL, NULL, NULL, NULL};
    return s;
}

/* The forward pass. options and execution may be NULL: the defaults. Errors: INVALID_ARGUMENT, UNSUPPORTED,
 * OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_forward(const softdelta_causal_convolution_inputs* inputs,
                                                                    const softdelta_causal_convolution_outputs* outputs,
                                                                    const softdelta_causal_convolution_options* options,
                                                                    const softdelta_execution* execution);
/* A token or a few of decode: the forward pass with outputs.final_state, required, as initial state and final state in
 * one; inputs.initial_state is not given. Errors: as the forward pass. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_step(const softdelta_causal_convolution_inputs* inputs,
                                                                 const softdelta_causal_convolution_outputs* outputs,
                                                                 const softdelta_causal_convolution_options* options,
                                                                 const softdelta_execution* execution);
/* The backward pass. Errors: as the forward pass; UNSUPPORTED also for gradients with state_indices. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_backward(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_gradients* gradients,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution);
/* Returns how many bytes of execution.workspace the same call needs, as for attention. A step needs what the forward
 * pass with its state as initial_state and final_state needs. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_forward_workspace(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_outputs* outputs,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution, size_t* bytes);
/* Returns how many bytes are enough for every forward pass and step within these limits, as for attention, with states
 * as initial_state has them. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_forward_workspace_bound(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_limits* limits,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution, size_t* bytes);
/* The same for the backward pass. */
SOFTDELTA_API softdelta_status softdelta_causal_convolution_backward_workspace(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_gradients* gradients,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution, size_t* bytes);

/* The gated norm, over the D channels of each row (Zhang and Sennrich 2019, with a gate)
 *
 *     y = weight · x / √(mean x² + epsilon) · gate(z)
 */

/* The tensors that the norm reads. x is required, z where there is a gate. */
typedef struct softdelta_gated_norm_inputs {
    size_t size;            /* of this structure */
    const DLTensor* x;      /* [B, T, H, D] */
    const DLTensor* z;      /* [B, T, H, D]; none without a gate */
    const DLTensor* weight; /* [D]; default 1 */
} softdelta_gated_norm_inputs;

/* With defaults: what is optional is not given. */
static inline softdelta_gated_norm_inputs softdelta_gated_norm_inputs_default(void) {
    softdelta_gated_norm_inputs i = {sizeof(softdelta_gated_norm_inputs), NULL, NULL, NULL};
    return i;
}

/* Options of the norm. */
typedef struct softdelta_gated_norm_options {
    size_t size;    /* of this structure */
    int32_t gate;   /* a softdelta_activation; silu is the default */
    double epsilon; /* 1e-6 */
} softdelta_gated_norm_options;

/* With defaults: what is optional is not given. */
static inline softdelta_gated_norm_options softdelta_gated_norm_options_default(void) {
    softdelta_gated_norm_options o = {sizeof(softdelta_gated_norm_options), SOFTDELTA_ACTIVATION_SILU, 1e-6};
    return o;
}

/* The result of the forward pass; required. */
typedef struct softdelta_gated_norm_outputs {
    size_t size; /* of this structure */
    DLTensor* y; /* [B, T, H, D]; may be x or z itself */
} softdelta_gated_norm_outputs;

/* With defaults: what is optional is not given. */
static inline softdelta_gated_norm_outputs softdelta_gated_norm_outputs_default(void) {
    softdelta_gated_norm_outputs s = {sizeof(softdelta_gated_norm_outputs), NULL};
    return s;
}

/* Gradients of a loss from the gradient of y. Any subset may be wanted. The sum over rows runs in an order that shapes
 * fix. */
typedef struct softdelta_gated_norm_gradients {
    size_t size;        /* of this structure */
    const DLTensor* dy; /* [B, T, H, D]; required */
    DLTensor* dx;       /* as x */
    DLTensor* dz;       /* as z */
    DLTensor* dweight;  /* as weight */
} softdelta_gated_norm_gradients;

/* With defaults: what is optional is not given. */
static inline softdelta_gated_norm_gradients softdelta_gated_norm_gradients_default(void) {
    softdelta_gated_norm_gradients s = {sizeof(softdelta_gated_norm_gradients), NULL, NULL, NULL, NULL};
    return s;
}

/* The forward pass. options and execution may be NULL: the defaults. Errors: INVALID_ARGUMENT, UNSUPPORTED,
 * OUT_OF_MEMORY. */
SOFTDELTA_API softdelta_status softdelta_gated_norm_forward(const softdelta_gated_norm_inputs* inputs,
                                                            const softdelta_gated_norm_outputs* outputs,
                                                            const softdelta_gated_norm_options* options,
                                                            const softdelta_execution* execution);
/* The backward pass. Errors: as the forward pass. */
SOFTDELTA_API softdelta_status softdelta_gated_norm_backward(const softdelta_gated_norm_inputs* inputs,
                                                             const softdelta_gated_norm_gradients* gradients,
                                                             const softdelta_gated_norm_options* options,
                                                             const softdelta_execution* execution);
/* Returns how many bytes of execution.workspace the same call needs, as for attention. */
SOFTDELTA_API softdelta_status softdelta_gated_norm_forward_workspace(const softdelta_gated_norm_inputs* inputs,
                                                                      const softdelta_gated_norm_outputs* outputs,
                                                                      const softdelta_gated_norm_options* options,
                                                                      const softdelta_execution* execution,
                                                                      size_t* bytes);
/* Returns how many bytes are enough for every forward pass of these channels, however many rows it has. */
SOFTDELTA_API softdelta_status softdelta_gated_norm_forward_workspace_bound(const softdelta_gated_norm_inputs* inputs,
                                                                            const softdelta_limits* limits,
                                                                            const softdelta_gated_norm_options* options,
                                                                            const softdelta_execution* execution,
                                                                            size_t* bytes);
/* The same for the backward pass. */
SOFTDELTA_API softdelta_status softdelta_gated_norm_backward_workspace(const softdelta_gated_norm_inputs* inputs,
                                                                       const softdelta_gated_norm_gradients* gradients,
                                                                       const softdelta_gated_norm_options* options,
                                                                       const softdelta_execution* execution,
                                                                       size_t* bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * This machine
 *
 * The kernels of engine "cpu" are compiled for several instruction sets. The last one in the list that the CPU has is
 * selected. SOFTDELTA_ISA in the environment selects another one by name; it is read once, when it is first needed. If
 * that one is not available, every call that needs the kernels fails with UNSUPPORTED, and so does
 * softdelta_get_isa_level.
 *
 * Linux grants matrix tiles to a process that asks. The first call that amxbf16 computes does, and from then on an
 * alternate stack for signals needs room for them (AT_MINSIGSTKSZ). Where the system refuses, the level before runs. */

/* An instruction set that kernels exist for. */
typedef struct softdelta_isa_level {
    size_t size;           /* of this structure */
    const char* name;      /* for SOFTDELTA_ISA and softdelta_select_isa_level; lives as long as the library */
    int32_t compiled;      /* 1: this build has kernels for it */
    int32_t available;     /* 1: compiled, and this CPU and operating system support it */
    int32_t selected;      /* 1: its kernels run */
    int32_t bf16_products; /* 1: it has dot products of bf16, and they are faster on this CPU than products of f32 */
} softdelta_isa_level;

/* With defaults: what is optional is not given. */
static inline softdelta_isa_level softdelta_isa_level_default(void) {
    softdelta_isa_level l = {sizeof(softdelta_isa_level), NULL, 0, 0, 0, 0};
    return l;
}

/* How many instruction sets are known. */
SOFTDELTA_API int32_t softdelta_isa_level_count(void);
/* Level `index`, from 0 on: each extends the one before. Errors: INVALID_ARGUMENT, UNSUPPORTED. */
SOFTDELTA_API softdelta_status softdelta_get_isa_level(int32_t index, softdelta_isa_level* level);
/* Selects the level of all calls that begin after it, while no call runs; NULL: what the environment selects. Errors:
 * UNSUPPORTED. */
SOFTDELTA_API softdelta_status softdelta_select_isa_level(const char* name);

#ifdef __cplusplus
}
#endif
#endif

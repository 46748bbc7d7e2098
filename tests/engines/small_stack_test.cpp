// Callers' threads may have little stack: 64 KiB in all do for every engine.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <climits>
#include <map>
#include <string>
#include <vector>

#include "io/call/call.h"
#include "io/call/make_case.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SOFTDELTA_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SOFTDELTA_SANITIZED
#endif
#endif

namespace softdelta {
namespace {

struct Work {
    const io::Call& call;
    std::map<std::string, Tensor> results;
    Execution execution;
    std::string error;
};

void* run(void* pointer) {
    Work& work = *static_cast<Work*>(pointer);
    try {
        io::execute(work.call, work.results, work.execution);
    } catch (const Unsupported&) {  // a build without kernels
    } catch (const std::exception& e) {
        work.error = e.what();
    }
    return nullptr;
}

// A thread that runs out of its stack ends the process.
void run_on_small_stack(Work& work) {
    const std::size_t bytes = std::max<std::size_t>(64 * 1024, PTHREAD_STACK_MIN);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    ASSERT_EQ(pthread_attr_setstacksize(&attributes, bytes), 0);
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, &attributes, run, &work), 0);
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
    EXPECT_EQ(work.error, "") << work.call.op;
}

TEST(SmallStack, HoldsEveryCall) {
#ifdef SOFTDELTA_SANITIZED
    GTEST_SKIP() << "frames are larger with sanitizers";
#endif
    for (const char* op : {"attention", "delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2"})
        for (const std::int64_t size : {64, 256}) {
            io::MakeOptions options;
            options.op = op;
            options.tokens = options.queries = options.keys = 200;
            options.key_size = options.value_size = size;
            options.bias = "full", options.sink = true, options.top_w = 100;
            const io::CaseFile file = io::make_case(options);
            const io::Call call = io::call_of(file);
            std::vector<io::OwnedTensor> memory;
            Work work{call, {}, {}, ""};
            for (const std::string& name : io::output_names(call)) {
                memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
                work.results[name] = memory.back().view();
            }
            work.execution.threads = 1;
            for (const std::string engine : {"fast", "reference", "stages_f64", "stages_f32"}) {
                work.execution.engine = engine;
                run_on_small_stack(work);
            }
        }
}

}  // namespace
}  // namespace softdelta

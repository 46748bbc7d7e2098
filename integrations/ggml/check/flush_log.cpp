// llama.cpp's programs write their text in another thread and end without waiting for it. This waits.
#include "log.h"

namespace {

struct AtExit {
    AtExit() { common_log_main(); }
    ~AtExit() { common_log_flush(common_log_main()); }
} at_exit;

}  // namespace

// SOFTDELTA_GGML_LOG=counts writes to stderr, when a backend is freed, how many calls softdelta computed of each
// operation. =times computes node by node and writes the time of every kind of operation: where the time of a graph
// goes.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "ggml.h"
#include "settings.h"

namespace softdelta_ggml {

class Log {
  public:
    using Clock = std::chrono::steady_clock;

    bool times_nodes() const { return level == LogLevel::times; }
    Clock::time_point start() const { return level == LogLevel::off ? Clock::time_point() : Clock::now(); }
    void add(const ggml_tensor* node, bool taken, Clock::time_point start);
    // A node that ggml computes, untimed. Only operations that softdelta knows are counted.
    void count(const ggml_tensor* node);
    void print() const;

  private:
    struct Row {
        std::int64_t calls = 0, taken = 0;
        double seconds = 0;
    };
    LogLevel level = settings().log;
    std::map<std::string, Row> rows;
};

}  // namespace softdelta_ggml

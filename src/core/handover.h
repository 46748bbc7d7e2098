// Events between a delta rule on a GPU and the rank that passes its states on.
#pragma once

namespace softdelta::core {

// Events of the GPU; null: none.
struct Handover {
    void* ready = nullptr;  // is waited for before an entering state is read
    void* done = nullptr;   // is recorded when the leaving state is filled
};

}  // namespace softdelta::core

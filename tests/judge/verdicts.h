// What the judge says of a set of results, for messages.
#pragma once

#include <ostream>
#include <vector>

#include "judge/floats.h"
#include "judge/verify.h"

namespace softdelta::test {

// On one thread: cases are small.
inline std::vector<judge::Finding> judge_results(const io::Call& call, const Results& results) {
    judge::Options options;
    options.threads = 1;
    return judge::verify(call, views(results), options);
}

inline bool any_wrong(const std::vector<judge::Finding>& findings) {
    for (const judge::Finding& f : findings)
        if (f.verdict == judge::Verdict::wrong) return true;
    return false;
}

inline bool all_right(const std::vector<judge::Finding>& findings) {
    for (const judge::Finding& f : findings)
        if (f.verdict != judge::Verdict::right && f.verdict != judge::Verdict::digits_lost) return false;
    return true;
}

inline bool is_wrong(const std::vector<judge::Finding>& findings, const std::string& result) {
    for (const judge::Finding& f : findings)
        if (f.name == result) return f.verdict == judge::Verdict::wrong;
    return false;
}

// One line a result: name, verdict, ratio, limit, note.
struct Table {
    const std::vector<judge::Finding>& findings;
};
inline std::ostream& operator<<(std::ostream& out, const Table& table) {
    constexpr const char* words[] = {"right", "digits lost", "WRONG", "CANNOT BE JUDGED"};
    for (const judge::Finding& f : table.findings)
        out << "  " << f.name << ": " << words[static_cast<int>(f.verdict)] << ", ratio " << f.ratio << ", limit "
            << f.limit << (f.note.empty() ? "" : "; ") << f.note << "\n";
    return out;
}

}  // namespace softdelta::test

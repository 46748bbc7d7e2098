// softdelta._native: where a case is wrong, and which mistake of the catalogue explains it.
#include "diagnose/diagnose.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <thread>

#include "diagnose/blind.h"
#include "diagnose/evidence/plot.h"
#include "diagnose/report.h"
#include "python/native/call.h"
#include "python/native/cases/cases.h"

namespace softdelta::python {

namespace {

using diagnose::Candidate;
using diagnose::Diagnosis;
using diagnose::Entry;
using diagnose::StageFinding;

nb::tuple names(const std::vector<const Entry*>& entries) {
    nb::list list;
    for (const Entry* entry : entries) list.append(nb::str(entry->name));
    return nb::tuple(list);
}

nb::dict to_python(const Candidate& c) {
    static constexpr const char* scopes[] = {"both", "forward", "backward"};
    nb::dict d;
    d["mistakes"] = names(c.entries);
    d["scope"] = scopes[static_cast<std::size_t>(c.scope)];
    d["left"] = nb::cast(c.left.results);
    d["worst_block"] = c.left.worst_block;
    d["explains"] = c.explains;
    d["equal"] = names(c.equal);
    return d;
}

nb::dict to_python(const StageFinding& f) {
    nb::dict d;
    d["name"] = nb::str(f.name.c_str());
    d["ratio"] = f.ratio;
    d["limit"] = f.limit;
    d["wrong"] = f.wrong;
    d["note"] = nb::str(f.note.c_str());
    return d;
}

template <class T>
nb::list to_list(const std::vector<T>& all) {
    nb::list list;
    for (const T& x : all) list.append(to_python(x));
    return list;
}

// Tells Python of the progress, from the thread that called, and lets Ctrl-C end a long run.
diagnose::Progress progress_to(nb::handle callback) {
    return [callback, caller = std::this_thread::get_id()](double fraction, const char* step) {
        if (std::this_thread::get_id() != caller) return;
        const Locked locked;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!callback.is_none()) callback(fraction, step);
    };
}

// Of results in `actual` or else the file's: what verify returns, the diagnosis in parts, as text and, if wanted, as a
// picture.
nb::dict diagnose_case(const io::CaseFile& file, const nb::dict& actual, std::size_t top, bool plot, int threads,
                       nb::handle progress, bool bf16) {
    const io::Call call = io::call_of(file);
    const ResultsToJudge results = results_of(call, file, actual, bf16);
    expect_results(results, file);
    std::map<std::string, Tensor> intermediates;
    for (const std::string& stage : call.intermediates) intermediates[stage] = file.view(stage);
    diagnose::Options options;
    options.threads = threads;
    options.progress = progress_to(progress);
    Diagnosis found;
    const auto start = std::chrono::steady_clock::now();
    {
        const Unlocked unlocked;
        found = diagnose::diagnose(call, results.views, intermediates, options);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const diagnose::Ranking& ranking = found.ranking;
    nb::dict d = verdict_of(file, call, found.findings);
    d["where"] = nb::tuple(nb::cast(found.where));
    d["stages"] = to_list(found.stages);
    d["conclusion"] = nb::tuple(nb::cast(found.conclusion));
    d["explained_by"] = ranking.explained() ? 1 : ranking.explained_by_two() ? 2 : 0;
    d["noise"] = ranking.noise;
    d["before"] = nb::cast(ranking.before.results);
    d["ranking"] = to_list(ranking.singles);
    d["pairs"] = to_list(ranking.pairs);
    d["within_rounding"] = names(ranking.within_rounding);
    d["no_effect"] = names(ranking.no_effect);
    d["seconds"] = seconds;
    d["text"] = nb::cast(diagnose::report(file.name, call, found, seconds, {top, false}));
    d["svg"] = nb::cast(plot ? diagnose::plot_errors(file.name, found.maps) : std::string());
    return d;
}

nb::dict diagnose_file(const nb::bytes& where, const nb::dict& actual, std::size_t top, bool plot, int threads,
                       nb::handle progress, bool bf16) {
    return diagnose_case(io::read_case(path_of(where)), actual, top, plot, threads, progress, bf16);
}

nb::dict diagnose_tensors(const Metadata& metadata, const nb::dict& tensors, const nb::dict& actual, std::size_t top,
                          bool plot, int threads, nb::handle progress, bool bf16) {
    return diagnose_case(case_of(metadata, tensors, bf16), actual, top, plot, threads, progress, bf16);
}

// (mistake, what shows it) of what the inputs hide for certain.
nb::list hidden_mistakes(const Metadata& metadata, const nb::dict& tensors, bool bf16) {
    const io::CaseFile file = case_of(metadata, tensors, bf16);
    const diagnose::Blindness blind = diagnose::blindness_by_facts(io::call_of(file));
    nb::list list;
    for (std::size_t i = 0; i < blind.unseen.size(); ++i)
        list.append(nb::make_tuple(blind.unseen[i]->name, blind.better[i]));
    return list;
}

}  // namespace

void bind_diagnose(nb::module_& m) {
    using namespace nb::literals;
    m.def("diagnose_file", &diagnose_file, "path"_a, "actual"_a, "top"_a, "plot"_a, "threads"_a, "progress"_a.none(),
          "bf16"_a);
    m.def("hidden_mistakes", &hidden_mistakes, "metadata"_a, "tensors"_a, "bf16"_a);
    m.def("diagnose_case", &diagnose_tensors, "metadata"_a, "tensors"_a, "actual"_a, "top"_a, "plot"_a, "threads"_a,
          "progress"_a.none(), "bf16"_a);
}

}  // namespace softdelta::python

// softdelta._native: version, instruction sets, engines, the names of a call's tensors, and the program.
#include "cli/program.h"
#include "core/rule_facts.h"
#include "python/native/call.h"

namespace softdelta::python {

namespace {

nb::list isa_levels() {
    nb::list all;
    for (const IsaLevel& level : softdelta::isa_levels()) {
        nb::dict d;
        d["name"] = nb::str(level.name.c_str());
        d["compiled"] = level.compiled;
        d["available"] = level.available;
        d["selected"] = level.selected;
        all.append(d);
    }
    return all;
}

nb::list engines() {
    nb::list names;
    for (const EngineInfo& engine : list_engines()) names.append(nb::str(engine.name.c_str()));
    return names;
}

// The program's exit status. Arguments are bytes: names of files need not be text.
int program(const nb::list& arguments) {
    std::vector<const char*> argv;
    for (const nb::handle argument : arguments) argv.push_back(nb::cast<nb::bytes>(argument).c_str());
    const Unlocked unlocked;
    return cli::program(static_cast<int>(argv.size()), argv.data());
}

// The names of a structure's tensors, in the order of softdelta.h.
template <class Struct>
nb::tuple names_of() {
    nb::list names;
    for (const auto& field : fields_of<Struct>) names.append(nb::str(field.name));
    return nb::tuple(names);
}

}  // namespace

void bind_machine(nb::module_& m) {
    m.def("version", [] { return nb::str(softdelta_version()); });
    m.def("engines", &engines);
    m.def("isa_levels", &isa_levels);
    m.def("program", &program);
    nb::list rules;
    for (const core::Rule& rule : core::rules) rules.append(nb::str(rule.name.data()));
    m.attr("RULES") = nb::tuple(rules);
    nb::dict numbers, facts;
    const auto add = [&](const core::Rule& rule) {
        constexpr const char *gates[] = {"none", "head", "channel"}, *states[] = {"decayed", "previous", "nothing"};
        numbers[rule.name.data()] = core::number_of(rule);
        facts[rule.name.data()] =
            nb::make_tuple(gates[static_cast<int>(rule.gate)], states[static_cast<int>(rule.erase)], rule.own_p);
    };
    for (const core::Rule& rule : core::rules) add(rule);
    for (const core::Rule& rule : core::rules_of_facts) add(rule);
    m.attr("RULE_NUMBERS") = numbers;
    m.attr("RULE_FACTS") = facts;
    m.attr("ATTENTION_INPUTS") = names_of<AttentionInputs>();
    m.attr("ATTENTION_OUTPUTS") = names_of<AttentionOutputs>();
    m.attr("ATTENTION_GRADIENTS") = names_of<AttentionGradients>();
    m.attr("DELTA_INPUTS") = names_of<DeltaInputs>();
    m.attr("DELTA_OUTPUTS") = names_of<DeltaOutputs>();
    m.attr("DELTA_GRADIENTS") = names_of<DeltaGradients>();
    m.attr("CONVOLUTION_INPUTS") = names_of<ConvolutionInputs>();
    m.attr("CONVOLUTION_OUTPUTS") = names_of<ConvolutionOutputs>();
    m.attr("CONVOLUTION_GRADIENTS") = names_of<ConvolutionGradients>();
    m.attr("NORM_INPUTS") = names_of<NormInputs>();
    m.attr("NORM_OUTPUTS") = names_of<NormOutputs>();
    m.attr("NORM_GRADIENTS") = names_of<NormGradients>();
}

}  // namespace softdelta::python

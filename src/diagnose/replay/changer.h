// Makes the mistakes of a run at the places that the pipelines name.
#pragma once

#include <array>
#include <string_view>

#include "diagnose/catalogue/mistake.h"
#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

double to_bf16_and_back(double x);

// What a change multiplies a place by: 1 where it is no number.
double factor_of(Change change, double scale, double group);

// The head that one is taken for.
Index other_head(Change change, Index h, Index heads);

class Changer {
  public:
    Changer(const Mistakes& mistakes, double scale, double group) : mistakes_(mistakes), scale_(scale), group_(group) {}

    bool has(std::string_view place, Change change) const { return mistakes_.has(Point{place, change}); }
    // What a kernel with the mistakes has for x: rows, products of rows with rows, or a state. β is that of its rows.
    // A row of an operand was read from elsewhere already: row_offset.
    void value(std::string_view place, Matrix& x, const Vector* beta = nullptr, bool operand = false);
    // Which row an operand's row is read from: 0, its own.
    Index row_offset(std::string_view place) const;
    void value(std::string_view place, Vector& x, const Vector* beta = nullptr, bool operand = false);
    double value(std::string_view place, double x) const;
    // Sums of gates as a kernel takes them into an exponential.
    Matrix exponents(std::string_view place, Matrix X) const;
    // Another sequence or head begins.
    void restart() { stale_ = {}; }
    // What is written.
    void written(const io::Call& call, Results& results) const;

  private:
    double factor(Change change) const { return factor_of(change, scale_, group_); }

    const Mistakes& mistakes_;
    double scale_, group_;
    std::array<Matrix, Mistakes::most_points> stale_;
};

}  // namespace softdelta::diagnose

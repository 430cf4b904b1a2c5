// The pictures of a sweep as SVG, drawn from its results: mean of the runs that differ in other fields alone, and bars from the lowest to the
// highest.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sweep/plan.h"
#include "sweep/results.h"

namespace pathattn {

std::string draw_figure(const Figure& figure, const std::vector<RunResult>& results);

// output/figure-1.svg, figure-2.svg, ...; none as long as no run is done.
void write_figures(const std::vector<Figure>& figures, const std::vector<RunResult>& results, const std::filesystem::path& output);

// A line for each `y` that no run has although some have results: "figure 1: no run has a result dnse; there are dense, sparse".
std::vector<std::string> missing_results(const std::vector<Figure>& figures, const std::vector<RunResult>& results);

}  // namespace pathattn

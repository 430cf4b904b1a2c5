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

}  // namespace pathattn

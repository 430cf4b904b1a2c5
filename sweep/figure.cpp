#include "sweep/figure.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/files.h"

namespace pathattn {
namespace {

struct Style {
  const char *colour, *dashes, *marker;  // marker: an SVG path around (0, 0)
};

// Colours of Okabe and Ito; dashes and markers tell them apart in grey.
constexpr Style kStyles[] = {{"#0072B2", "none", "M-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0"},
                             {"#D55E00", "9 3", "M-4,-4 h8 v8 h-8 z"},
                             {"#009E73", "3 3", "M-5,4 h10 l-5,-9 z"},
                             {"#4d4d4d", "9 3 2 3", "M0,-5 l5,5 l-5,5 l-5,-5 z"},
                             {"#E69F00", "1 3", "M-5,-4 h10 l-5,9 z"},
                             {"#CC79A7", "14 4", "M-1,-5 h2 v4 h4 v2 h-4 v4 h-2 v-4 h-4 v-2 h4 z"}};

constexpr double kWidth = 420, kHeight = 260;                       // of a panel's axes, in pixels
constexpr double kLeft = 66, kRight = 18, kTop = 34, kBottom = 52;  // around them
constexpr double kHead = 58, kFoot = 24;                            // title and legend above the panels, a note below
constexpr int kMostLabels = 20;                                     // on a horizontal axis

// A list without repetitions, in order of appearance.
class Names {
 public:
  size_t index(const std::string& name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) names_.push_back(name);
    return static_cast<size_t>(found == names_.end() ? static_cast<int64_t>(names_.size()) - 1 : found - names_.begin());
  }
  const std::vector<std::string>& all() const { return names_; }

 private:
  std::vector<std::string> names_;
};

struct Data {
  std::vector<std::string> panels, lines, x;
  std::vector<std::vector<std::vector<std::vector<double>>>> values;  // [panel][line][x]: of each run
  bool x_is_numeric = false;
  double highest = 0;
};

std::optional<double> number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

std::string value_of(const RunResult& result, const std::string& field) {
  for (const auto& [name, value] : result.run->fields) {
    if (name == field) return value.is_string() ? value.get<std::string>() : value.dump();
  }
  return "";
}

bool is_or_has_part(const std::string& result, const std::string& name) { return name == result || name.starts_with(result + "."); }

struct Point {
  std::string panel, line, x;
  double y;
};

std::vector<Point> collect_points(const Figure& figure, const std::vector<RunResult>& results) {
  std::vector<Point> points;
  for (const RunResult& result : results) {
    for (const std::string& y : figure.y) {
      for (const auto& [name, value] : result.results) {
        if (!is_or_has_part(y, name)) continue;
        const std::string x = !figure.x.empty() ? value_of(result, figure.x) : name == y ? name : name.substr(y.size() + 1);
        points.push_back({value_of(result, figure.panel), value_of(result, figure.line), x, value});
      }
    }
  }
  return points;
}

Data gather(const Figure& figure, const std::vector<RunResult>& results) {
  const std::vector<Point> points = collect_points(figure, results);
  Names panels, lines, places;
  for (const Point& point : points) panels.index(point.panel), lines.index(point.line), places.index(point.x);
  Data data{.panels = panels.all(), .lines = lines.all(), .x = places.all(), .values = {}};
  data.x_is_numeric = std::all_of(data.x.begin(), data.x.end(), [](const std::string& x) { return number(x).has_value(); });
  if (data.x_is_numeric) std::sort(data.x.begin(), data.x.end(), [](const auto& left, const auto& right) { return *number(left) < *number(right); });
  data.values.resize(data.panels.size(), std::vector(data.lines.size(), std::vector<std::vector<double>>(data.x.size())));
  for (const Point& point : points) {
    const auto x = static_cast<size_t>(std::find(data.x.begin(), data.x.end(), point.x) - data.x.begin());
    data.values[panels.index(point.panel)][lines.index(point.line)][x].push_back(point.y);
    data.highest = std::max(data.highest, point.y);
  }
  return data;
}

// Control characters, which XML has no way to write, become spaces.
std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20;
    safe += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, control ? ' ' : c);
  }
  return safe;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more, escaped(text));
}

std::string marker_at(double x, double y, const Style& style) {
  return fmt::format("<path d=\"{}\" transform=\"translate({:.1f},{:.1f})\" fill=\"{}\"/>\n", style.marker, x, y, style.colour);
}

std::string line_between(double x1, double y1, double x2, double y2, const char* colour) {
  return fmt::format("<path d=\"M{:.1f},{:.1f} L{:.1f},{:.1f}\" stroke=\"{}\"/>\n", x1, y1, x2, y2, colour);
}

// A round distance of some five ticks up to `highest`.
double tick_distance(double highest) {
  const double rough = std::max(highest, 1e-9) / 5, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double step : {1.0, 2.0, 5.0}) {
    if (rough <= step * power * 1.0001) return step * power;
  }
  return 10 * power;
}

class Panel {
 public:
  Panel(const Figure& figure, const Data& data, size_t index, double left, double top)
      : figure_(figure), data_(data), index_(index), left_(left), top_(top), tick_(tick_distance(data.highest)) {
    top_value_ = std::max(1.0, std::ceil(data.highest / tick_ - 1e-9)) * tick_;
  }

  std::string draw() const {
    std::string svg = axes();
    for (size_t line = 0; line < data_.lines.size(); ++line) svg += series(line);
    return svg;
  }

 private:
  double slot() const { return kWidth / static_cast<double>(data_.x.size()); }
  double middle_of(size_t place) const { return left_ + slot() * (static_cast<double>(place) + 0.5); }
  double x_at(size_t place, size_t line) const {
    const double shift = data_.x_is_numeric ? 0 : (static_cast<double>(line) + 0.5) / static_cast<double>(data_.lines.size()) - 0.5;
    return middle_of(place) + 0.6 * slot() * shift;
  }
  double y_at(double value) const { return top_ + kHeight * (1 - value / top_value_); }

  std::string axes() const {
    std::string svg;
    for (double value = 0; value <= top_value_ * 1.0001; value += tick_) {
      svg += line_between(left_, y_at(value), left_ + kWidth, y_at(value), value == 0 ? "#000" : "#ddd");
      svg += text_at(left_ - 8, y_at(value) + 4, "end", fmt::format("{:.4g}", value));
    }
    const size_t every = (data_.x.size() + kMostLabels - 1) / kMostLabels;
    for (size_t place = 0; place < data_.x.size(); place += every) svg += text_at(middle_of(place), top_ + kHeight + 18, "middle", data_.x[place]);
    svg += text_at(left_ + kWidth / 2, top_ + kHeight + 40, "middle", figure_.x_label.empty() ? figure_.x : figure_.x_label);
    const std::string turned = fmt::format(" transform=\"rotate(-90 {:.1f} {:.1f})\"", left_ - 46, top_ + kHeight / 2);
    svg += text_at(left_ - 46, top_ + kHeight / 2, "middle", figure_.y_label.empty() ? figure_.y.front() : figure_.y_label, turned.c_str());
    if (!figure_.panel.empty()) svg += text_at(left_, top_ - 10, "start", figure_.panel + " = " + data_.panels[index_]);
    return svg;
  }

  std::string series(size_t line) const {
    const Style& style = kStyles[line % std::size(kStyles)];
    std::string path, marks;
    for (size_t place = 0; place < data_.x.size(); ++place) {
      const std::vector<double>& values = data_.values[index_][line][place];
      if (values.empty()) continue;
      double sum = 0;
      for (const double value : values) sum += value;
      const auto [low, high] = std::minmax_element(values.begin(), values.end());
      const double x = x_at(place, line), y = y_at(sum / static_cast<double>(values.size()));
      path += fmt::format("{}{:.1f},{:.1f} ", path.empty() ? "M" : "L", x, y);
      marks += line_between(x, y_at(*low), x, y_at(*high), style.colour) + marker_at(x, y, style);
    }
    if (!data_.x_is_numeric || path.empty()) return marks;
    return fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\"/>\n", path, style.colour,
                       style.dashes) +
           marks;
  }

  const Figure& figure_;
  const Data& data_;
  size_t index_;
  double left_, top_, tick_, top_value_;
};

std::string legend(const Data& data) {
  if (data.lines.size() == 1 && data.lines.front().empty()) return "";
  std::string svg;
  double x = kLeft;
  for (size_t line = 0; line < data.lines.size(); ++line) {
    svg += marker_at(x + 5, 42, kStyles[line % std::size(kStyles)]) + text_at(x + 15, 46, "start", data.lines[line]);
    x += 30 + 8 * static_cast<double>(data.lines[line].size());
  }
  return svg;
}

}  // namespace

std::string draw_figure(const Figure& figure, const std::vector<RunResult>& results) {
  const Data data = gather(figure, results);
  if (data.x.empty()) return "";
  const size_t columns = std::min<size_t>(2, data.panels.size()), rows = (data.panels.size() + columns - 1) / columns;
  const double panel_width = kLeft + kWidth + kRight, panel_height = kTop + kHeight + kBottom;
  const double width = panel_width * static_cast<double>(columns), height = kHead + panel_height * static_cast<double>(rows) + kFoot;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      width, height);
  svg += text_at(kLeft, 22, "start", figure.title, " font-weight=\"bold\"") + legend(data);
  for (size_t panel = 0; panel < data.panels.size(); ++panel) {
    svg += Panel(figure, data, panel, panel_width * static_cast<double>(panel % columns) + kLeft,
                 kHead + panel_height * static_cast<double>(panel / columns) + kTop)
               .draw();
  }
  svg += text_at(kLeft, height - 8, "start", "Mean of the runs; bars from the lowest to the highest.", " fill=\"#555\"");
  return svg + "</svg>\n";
}

void write_figures(const std::vector<Figure>& figures, const std::vector<RunResult>& results, const std::filesystem::path& output) {
  for (size_t i = 0; i < figures.size(); ++i) {
    const std::string svg = draw_figure(figures[i], results);
    if (!svg.empty()) write_file_atomically(output / fmt::format("figure-{}.svg", i + 1), svg);
  }
}

std::vector<std::string> missing_results(const std::vector<Figure>& figures, const std::vector<RunResult>& results) {
  const std::vector<std::string> names = result_names(results);
  std::set<std::string> known;
  for (const std::string& name : names) known.insert(name.substr(0, name.find('.')));
  std::vector<std::string> missing;
  for (size_t i = 0; i < figures.size(); ++i) {
    for (const std::string& y : figures[i].y) {
      if (names.empty() || std::any_of(names.begin(), names.end(), [&y](const std::string& name) { return is_or_has_part(y, name); })) continue;
      missing.push_back(fmt::format("figure {}: no run has a result {}; there are {}", i + 1, y, fmt::join(known, ", ")));
    }
  }
  return missing;
}

}  // namespace pathattn

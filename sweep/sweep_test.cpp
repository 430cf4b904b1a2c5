// A sweep's file: which runs it makes, in which order, and what is refused; what its tables and figures say of the runs' files.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error_of.h"
#include "base/scratch_folder.h"
#include "sweep/figure.h"
#include "sweep/plan.h"
#include "sweep/results.h"

namespace pathattn {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

class SweepTest : public testing::Test {
 protected:
  SweepTest() {
    scratch_.write("tiny.toml",
                   "[model]\nkind = \"path\"\nhidden_size = 16\nnum_layers = 1\nnum_heads = 2\n[data]\nkind = \"flip_flop\"\n"
                   "[train]\nbatch_size = 4\ntokens = 32\nsteps = 7\n");
  }

  SweepPlan load(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    scratch_.write("sweep.toml", text);
    return SweepPlan::load(scratch_ / "sweep.toml", overrides, "");
  }
  std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    return error_of([&] { load(text, overrides); });
  }

  // Leaves what a run that was trained and evaluated leaves.
  void finish(const SweepRun& run, const json& evaluation) const {
    scratch_.write("out/runs/" + run.name + "/run.json", R"({"status": "finished", "step": 7, "steps": 7, "tokens": 896, "recipe": {}})");
    scratch_.write("out/runs/" + run.name + "/evaluation.json", evaluation.dump());
    write_outcome(run, output_, "");
  }
  std::vector<RunResult> results(const SweepPlan& plan) const {
    std::vector<RunResult> results;
    for (const SweepRun& run : plan.runs) results.push_back(read_result(run, output_));
    return results;
  }

  const ScratchFolder scratch_;
  const fs::path output_ = scratch_.path() / "out";
};

constexpr const char* kGrid = "recipe = \"tiny.toml\"\n[grid]\nmodel.kind = [\"rope\", \"path\"]\ntrain.seed = [1, 2]\n";

TEST_F(SweepTest, every_combination_is_a_run_and_seeds_vary_slowest) {
  std::vector<std::string> names;
  const SweepPlan plan = load(kGrid);
  for (const SweepRun& run : plan.runs) names.push_back(run.name);
  EXPECT_EQ(names, (std::vector<std::string>{"kind=rope,seed=1", "kind=path,seed=1", "kind=rope,seed=2", "kind=path,seed=2"}));
  EXPECT_EQ(plan.runs[2].recipe.at("model").at("kind"), "rope");
  EXPECT_EQ(plan.runs[2].recipe.at("train").at("seed"), 2);
  EXPECT_EQ(plan.runs[2].recipe.at("train").at("steps"), 7);
}

TEST_F(SweepTest, overrides_reach_every_run) {
  for (const SweepRun& run : load(kGrid, {"train.steps=3"}).runs) EXPECT_EQ(run.steps, 3);
}

TEST_F(SweepTest, sweeps_among_the_recipes_are_whole) {
  const fs::path recipes = fs::path(PATHATTN_SOURCE_DIR) / "recipes/state-tracking/sweeps";
  const std::pair<const char*, size_t> sweeps[] = {
      {"flip-flop.toml", 9}, {"flip-flop-baselines.toml", 6}, {"word-problem.toml", 60}, {"mqrar.toml", 60}};
  for (const auto& [name, num_runs] : sweeps) {
    const SweepPlan plan = SweepPlan::load(recipes / name, {}, "cpu");
    EXPECT_EQ(plan.runs.size(), num_runs) << name;
    EXPECT_EQ(plan.figures.size(), 1u) << name;
  }
}

TEST_F(SweepTest, what_is_unknown_or_out_of_range_is_named_before_any_run) {
  const std::string recipe = "recipe = \"tiny.toml\"\n";
  const std::pair<std::string, const char*> refused[] = {
      {recipe + "[grid]\nmodel.knd = [\"rope\"]\n", "did you mean model.kind?"},
      {recipe + "[gird]\nmodel.kind = [\"rope\"]\n", "there is no [grid]"},
      {recipe + "[grid]\nmodel.kind = [\"rope\"]\n[[figur]]\ny = \"dense\"\n", "did you mean figure?"},
      {recipe + "[grid]\nmodel.kind = \"rope\"\n", "grid.model.kind = \"rope\" must be a list of values"},
      {recipe + "[grid]\nmodel.kind = []\n", "must be a list of values"},
      {recipe + "[grid]\nmodel.kind = [\"path\", \"rop\"]\n", "run kind=rop: "},
      {recipe + "[grid]\ntrain.learning_rate = [0.1, -1]\n", "train.learning_rate = -1"},
      {recipe + "[grid]\ntrain.seed = [1, 1]\n", "grid.train.seed has 1 and 1, which are equal"},
      {recipe + "[grid]\ntrain.weight_decay = [1, 0.5, 1.0]\n", "grid.train.weight_decay has 1 and 1.0, which are equal"},
      {recipe + "[grid]\ntrain.device = [\"tpu\"]\n", "there is no device tpu"},
      {"[grid]\ntrain.seed = [1]\n", "recipe is missing"},
      {"recipe = \"none.toml\"\n[grid]\ntrain.seed = [1]\n", "none.toml"},
      {recipe + "[grid]\ntrain.seed = [1]\n[[figure]]\nline = \"train.seed\"\n", "y is missing"},
      {recipe + "[grid]\ntrain.seed = [1]\n[[figure]]\ny = \"dense\"\nline = \"model.kind\"\n",
       "model.kind is no field of the grid, which has train.seed"},
      {recipe + "[grid]\ntrain.seed = [1]\n[[figure]]\ny = \"dense\"\nlin = \"train.seed\"\n", "did you mean line?"},
      {recipe + "figure = 3\n[grid]\ntrain.seed = [1]\n", "figure = 3 must be tables"},
  };
  for (const auto& [text, message] : refused) EXPECT_NE(refusal(text).find(message), std::string::npos) << text << refusal(text);
  EXPECT_NE(refusal(kGrid, {"train.seed=3"}).find("cannot override train.seed"), std::string::npos);
  scratch_.write("a b.txt", std::string(10'000, 'a'));
  const std::string files = fmt::format("data.files = [\"{}\", \"{}\"]\n", scratch_ / "a b.txt", scratch_ / "a:b.txt");
  const std::string same_name = refusal(recipe + "[grid]\ndata.kind = [\"text\"]\n" + files);
  EXPECT_NE(same_name.find("two runs of the grid have the name files="), std::string::npos) << same_name;
  std::string many = recipe + "[grid]\n";
  for (const char* field : {"train.seed", "train.steps", "train.warmup_steps"}) {
    many += std::string(field) + " = [1";
    for (int value = 2; value <= 30; ++value) many += ", " + std::to_string(value);
    many += "]\n";
  }
  EXPECT_NE(refusal(many).find("more than 10000 runs"), std::string::npos);
}

TEST_F(SweepTest, a_run_is_done_when_it_was_evaluated_with_this_very_recipe) {
  const SweepPlan plan = load(kGrid);
  EXPECT_EQ(results(plan)[0].status, "waiting");
  finish(plan.runs[0], {{"task", "flip_flop"}, {"dense", 0.5}});
  EXPECT_EQ(results(plan)[0].status, "done");
  EXPECT_EQ(results(load(kGrid, {"data.test_reads=20"}))[0].status, "unfinished");
  write_outcome(plan.runs[0], output_, "no luck");
  EXPECT_EQ(results(plan)[0].status, "failed");
  EXPECT_EQ(results(plan)[0].error, "no luck");
  finish(plan.runs[0], {{"dense", 0.5}});
  for (const char* file : {"evaluation.json", "outcome.json"}) {
    finish(plan.runs[0], {{"dense", 0.5}});
    scratch_.write(std::string("out/runs/kind=rope,seed=1/") + file, "{\"da");
    EXPECT_EQ(results(plan)[0].status, "unfinished") << file;
  }
}

TEST_F(SweepTest, table_has_a_line_for_each_run_and_a_column_for_each_result) {
  const SweepPlan plan = load(kGrid);
  finish(plan.runs[0], {{"accuracy", {{"1", 99.5}, {"2", 50}, {"10", 3}}}, {"run", {{"step", 7}}}});
  fs::create_directories(folder_of(plan.runs[1], output_));
  write_outcome(plan.runs[1], output_, "the \"loss\" is nan, here");
  scratch_.write("out/runs/kind=path,seed=1/run.json", R"({"status": "running", "step": 0, "steps": 7, "tokens": 0})");
  scratch_.write("out/runs/kind=path,seed=1/metrics.jsonl", "{\"step\": 5, \"tokens\": 640}\n");
  write_tables(results(plan), output_, {{"tokens", 5}});
  EXPECT_EQ(read_file(output_ / "table.csv"),
            "model.kind,train.seed,status,step,steps,tokens,seconds,parameters,loss,accuracy.1,accuracy.2,accuracy.10,error\n"
            "rope,1,done,7,7,896,,,,99.5,50.0,3.0,\n"
            "path,1,failed,5,7,640,,,,,,,\"the \"\"loss\"\" is nan, here\"\n"
            "rope,2,waiting,,,,,,,,,,\n"
            "path,2,waiting,,,,,,,,,,\n");
  const json table = json::parse(read_file(output_ / "table.json"));
  EXPECT_EQ(table.at("tokens"), 5);
  EXPECT_EQ(table.at("runs").at(0).at("fields"), (json{{"model.kind", "rope"}, {"train.seed", 1}}));
  EXPECT_EQ(table.at("runs").at(0).at("evaluation").at("accuracy").at("10"), 3);
  EXPECT_EQ(table.at("runs").at(1).at("status"), "failed");
}

TEST_F(SweepTest, progress_is_read_from_the_last_whole_line_of_training) {
  const SweepPlan plan = load(kGrid);
  EXPECT_EQ(logged_progress(plan.runs[0], output_).step, 0);
  std::string log;
  for (int step = 1; step <= 200; ++step) log += fmt::format("{{\"step\": {}, \"tokens\": {}, \"loss\": 0.5}}\n", step, 10 * step);
  scratch_.write("out/runs/kind=rope,seed=1/metrics.jsonl",
                 log + "{\"step\": 200, \"validation_loss\": 1}\n{\"step\": 201, \"tokens\": 2010}\n{\"step\": 202, \"tok");
  EXPECT_EQ(logged_progress(plan.runs[0], output_).step, 201);
  EXPECT_EQ(logged_progress(plan.runs[0], output_).tokens, 2010);
}

// 0 lies at the bottom of the axes (y = 352), the highest tick at their top (y = 92), 260 above.
TEST_F(SweepTest, figure_shows_the_mean_of_the_seeds_and_their_range) {
  const SweepPlan plan =
      load(std::string(kGrid) + "[[figure]]\ntitle = \"A & B\\u0001\\u001b\"\ny = \"accuracy\"\nline = \"model.kind\"\nx_label = \"length\"\n");
  const double values[] = {20, 100, 40, 100};
  for (size_t i = 0; i < 4; ++i) finish(plan.runs[i], {{"accuracy", {{"2", values[i]}, {"10", 0}}}});
  const std::string svg = draw_figure(plan.figures[0], results(plan));
  const double y_30 = 352 - 260 * 0.3, y_20 = 352 - 260 * 0.2, y_40 = 352 - 260 * 0.4;
  EXPECT_NE(svg.find(fmt::format("translate(171.0,{:.1f})", y_30)), std::string::npos) << svg;
  EXPECT_NE(svg.find(fmt::format("M171.0,{:.1f} L171.0,{:.1f}", y_20, y_40)), std::string::npos) << svg;
  EXPECT_NE(svg.find("translate(171.0,92.0)"), std::string::npos) << svg;
  for (const char* text : {">A &amp; B  <", ">length<", ">accuracy<", ">rope<", ">path<", ">100<"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  EXPECT_LT(svg.find(">2<"), svg.find(">10<"));
  EXPECT_TRUE(std::none_of(svg.begin(), svg.end(), [](unsigned char c) { return c < 0x20 && c != '\n'; })) << svg;
}

TEST_F(SweepTest, no_figure_without_results) {
  const SweepPlan plan = load(std::string(kGrid) + "[[figure]]\ny = \"accuracy\"\n");
  write_figures(plan.figures, results(plan), output_);
  EXPECT_FALSE(fs::exists(output_ / "figure-1.svg"));
  EXPECT_TRUE(missing_results(plan.figures, results(plan)).empty());
}

TEST_F(SweepTest, a_result_of_a_figure_that_no_run_has_is_named) {
  const SweepPlan plan = load(std::string(kGrid) + "[[figure]]\ny = \"accuracy\"\n[[figure]]\ny = [\"accuracy.2\", \"dnse\", \"dense\", \"acc\"]\n");
  finish(plan.runs[0], {{"dense", 0.5}, {"task", "none"}});
  finish(plan.runs[1], {{"accuracy", {{"2", 99.5}, {"10", 3}}}});
  const std::string known = "; there are accuracy, dense";
  EXPECT_EQ(missing_results(plan.figures, results(plan)),
            (std::vector<std::string>{"figure 2: no run has a result dnse" + known, "figure 2: no run has a result acc" + known}));
}

}  // namespace
}  // namespace pathattn

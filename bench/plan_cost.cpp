// What planning costs: from two layouts and block tables to slices, for one request.
//
//   plan_cost --case all --runs 200 --output text|json
//
// The cases have 112,000 slices each where the blocks lie scattered; others show what other orders,
// other block sizes and neighbouring blocks cost.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/kvcache/plan.hpp>

#include "bench/random.hpp"

DEFINE_string(case, "all", "the case of that name, or all");
DEFINE_int32(runs, 200, "plans per case");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// One rank's side of a case.
struct Side {
  DimOrder order;
  std::uint32_t block_tokens;
  std::uint32_t tp_size;
};

enum class Blocks { scattered, neighbouring };

struct Case {
  std::string_view name;
  std::string_view model;
  Side source;
  Side destination;
  std::uint32_t tokens;
  Blocks blocks = Blocks::scattered;
};

using namespace page_order;

// 700 blocks of llama-3.1-70b are 80 layers x 2 parts x 700 = 112,000 slices.
const std::vector<Case> cases = {
    {"same", "llama-3.1-70b", {vllm_nhd, 16, 8}, {vllm_nhd, 16, 8}, 11200},
    {"same_hnd", "llama-3.1-70b", {vllm_hnd, 16, 1}, {vllm_hnd, 16, 1}, 11200},
    {"block_sizes", "llama-3.1-70b", {vllm_nhd, 16, 8}, {vllm_nhd, 32, 8}, 11200},
    {"tp_8_to_1_hnd", "llama-3.1-70b", {vllm_hnd, 16, 8}, {vllm_hnd, 16, 1}, 11200},
    {"tp_8_to_1_nhd", "llama-3.1-70b", {vllm_nhd, 16, 8}, {vllm_nhd, 16, 1}, 704},
    {"nhd_to_hnd", "llama-3.1-70b", {vllm_nhd, 16, 4}, {vllm_hnd, 16, 4}, 352},
    {"page_first", "llama-3.1-70b", {sglang_page_first, 16, 8}, {vllm_nhd, 16, 8}, 704},
    {"neighbours", "llama-3.1-70b", {vllm_nhd, 16, 8}, {vllm_nhd, 16, 8}, 11200, Blocks::neighbouring},
    {"mla", "deepseek-v3", {vllm_nhd, 64, 1}, {vllm_nhd, 64, 8}, 117504},
};

Layout make_layout(const Case& one, const Side& side) {
  const std::uint32_t blocks = one.tokens / side.block_tokens + 1000;
  return packed_layout(find_model_shape(one.model).value(),
                       {.block_tokens = side.block_tokens, .blocks = blocks, .tp_size = side.tp_size}, side.order)
      .value();
}

std::vector<BlockId> make_table(const Case& one, const Layout& layout, Random& random) {
  std::vector<BlockId> blocks(layout.spec().blocks);
  for (BlockId id = 0; id < blocks.size(); ++id) blocks[id] = id;
  if (one.blocks == Blocks::scattered) shuffle(blocks, random);
  blocks.resize((one.tokens + layout.spec().block_tokens - 1) / layout.spec().block_tokens);
  return blocks;
}

struct Cost {
  std::size_t slices = 0;
  double p50_us = 0;
  double p99_us = 0;
};

Cost measure(const Case& one) {
  Random random(7);
  const Layout source = make_layout(one, one.source);
  const Layout destination = make_layout(one, one.destination);
  const std::vector<BlockId> source_blocks = make_table(one, source, random);
  const std::vector<BlockId> destination_blocks = make_table(one, destination, random);
  const PlanRequest request{.source = {&source, source_blocks, 0},
                            .destination = {&destination, destination_blocks, 0},
                            .tokens = {0, one.tokens},
                            .layers = {0, source.spec().layers}};
  Cost cost;
  std::vector<double> microseconds;
  const int warm_up = std::min(10, FLAGS_runs);
  for (int i = -warm_up; i < FLAGS_runs; ++i) {
    const auto start = Clock::now();
    const auto plan = make_plan(request);
    const double took = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    if (!plan) throw StatusError(plan.status());
    cost.slices = plan->size();
    if (i >= 0) microseconds.push_back(took);
  }
  std::ranges::sort(microseconds);
  cost.p50_us = microseconds[microseconds.size() / 2];
  cost.p99_us = microseconds[microseconds.size() * 99 / 100];
  return cost;
}

void print(const Case& one, const Cost& cost) {
  const double per_slice = cost.p50_us * 1000 / static_cast<double>(cost.slices);
  if (FLAGS_output == "json") {
    const nlohmann::ordered_json line = {{"case", one.name},
                                         {"slices", cost.slices},
                                         {"p50_us", cost.p50_us},
                                         {"p99_us", cost.p99_us},
                                         {"ns_per_slice", per_slice}};
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print("{:<14} {:>7} slices   p50 {:>9.1f} us   p99 {:>9.1f} us   {:>8.1f} ns/slice\n", one.name, cost.slices,
               cost.p50_us, cost.p99_us, per_slice);
  }
  std::fflush(stdout);
}

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    throw StatusError({Errc::invalid_argument, fmt::format("--output={}: not one of text, json", FLAGS_output)});
  if (FLAGS_runs < 1) throw StatusError({Errc::invalid_argument, "--runs must be at least 1"});
  bool found = false;
  std::string names;
  for (const Case& one : cases) {
    names += fmt::format("{}, ", one.name);
    if (FLAGS_case != "all" && FLAGS_case != one.name) continue;
    found = true;
    print(one, measure(one));
  }
  if (!found)
    throw StatusError({Errc::invalid_argument, fmt::format("--case={}: not one of {}all", FLAGS_case, names)});
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("the cost of planning one request's slices");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "plan_cost: {}\n", e.what());
    return 2;
  }
}

// What RDMA costs the CPU per slice: submission to completion over simulated devices that complete at once and move
// nothing, so that only kvferry's own work is measured, and what a driver does at least: one look at each request.
//
//   verbs_cost --slices 1,160 --path poller,engine --iterations 20000 --output text|json
//
//   poller   one thread submits and steps the poller, on one core
//   engine   two engines; the caller waits, the poller's thread works
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/actors/engine.hpp>

#include "bench/allocations.hpp"
#include "bench/sizes.hpp"
#include "tests/support/core_pair.hpp"

DEFINE_string(slices, "1,16,160,1024", "slices per transfer: a number or a list");
DEFINE_string(path, "poller,engine", "what is measured: poller, engine or both");
DEFINE_int64(iterations, 20000, "transfers per measurement");
DEFINE_int64(slice_size, 16384, "bytes per slice; no byte is moved");
DEFINE_double(most_allocations, -1, "fail when a transfer takes more from the heap on average; -1: never");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

using test::CorePair;
using test::ScriptedNic;

struct Cost {
  std::string path;
  std::size_t slices = 0;
  double p50_us = 0;
  double p99_us = 0;
  double ns_per_slice = 0;
  double allocations_per_transfer = 0;
};

/// A gap after every slice on both sides, so that none merge and each is a request of its own.
std::vector<Slice> scattered(std::size_t count) {
  std::vector<Slice> slices;
  const auto size = static_cast<std::uint64_t>(FLAGS_slice_size);
  for (std::size_t i = 0; i < count; ++i) slices.push_back({i * 2 * size, i * 2 * size, size});
  return slices;
}

std::uint64_t region_bytes(std::uint64_t most) { return most * 2 * static_cast<std::uint64_t>(FLAGS_slice_size); }

Cost measure(const std::string& path, std::size_t count, const std::function<void(std::span<const Slice>)>& transfer) {
  const std::vector<Slice> slices = scattered(count);
  std::vector<double> microseconds;
  microseconds.reserve(static_cast<std::size_t>(FLAGS_iterations));
  const auto warm_up = std::min<std::int64_t>(1000, FLAGS_iterations);
  std::uint64_t allocated = 0;
  for (std::int64_t i = -warm_up; i < FLAGS_iterations; ++i) {
    if (i == 0) allocated = allocations();
    const auto start = Clock::now();
    transfer(slices);
    const auto took = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    if (i >= 0) microseconds.push_back(took);
  }
  allocated = allocations() - allocated;
  std::sort(microseconds.begin(), microseconds.end());
  Cost cost;
  cost.path = path;
  cost.slices = count;
  cost.p50_us = microseconds[microseconds.size() / 2];
  cost.p99_us = microseconds[microseconds.size() * 99 / 100];
  cost.ns_per_slice = cost.p50_us * 1000 / static_cast<double>(count);
  cost.allocations_per_transfer = static_cast<double>(allocated) / static_cast<double>(FLAGS_iterations);
  if (FLAGS_most_allocations >= 0 && cost.allocations_per_transfer > FLAGS_most_allocations)
    throw StatusError(
        {Errc::resource_exhausted, fmt::format("a transfer of {} slices takes {:.2f} allocations, more than the {} of "
                                               "--most_allocations",
                                               count, cost.allocations_per_transfer, FLAGS_most_allocations)});
  return cost;
}

void print(const Cost& cost) {
  const double per_slice = cost.allocations_per_transfer / static_cast<double>(cost.slices);
  if (FLAGS_output == "json") {
    const nlohmann::ordered_json line = {{"path", cost.path},
                                         {"slices", cost.slices},
                                         {"p50_us", cost.p50_us},
                                         {"p99_us", cost.p99_us},
                                         {"ns_per_slice", cost.ns_per_slice},
                                         {"allocations_per_transfer", cost.allocations_per_transfer},
                                         {"allocations_per_slice", per_slice}};
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print(
        "{:>7} {:>6} slices   p50 {:>8.2f} us   p99 {:>8.2f} us   {:>7.1f} ns/slice   {:.2f} allocations/transfer\n",
        cost.path, cost.slices, cost.p50_us, cost.p99_us, cost.ns_per_slice, cost.allocations_per_transfer);
  }
  std::fflush(stdout);
}

void require(const Status& status) {
  if (!status) throw StatusError(status);
}

void measure_poller(const std::vector<std::uint64_t>& counts, std::uint64_t most) {
  ScriptedNic nic(CorePair::devices(1));
  nic.complete_at_once();
  CorePair pair(nic, 1);
  pair.open_rails();
  pair.add_regions(region_bytes(most));
  for (const std::uint64_t count : counts)
    print(measure("poller", count, [&](std::span<const Slice> slices) {
      const auto transfer = pair.submit(Op::read, slices);
      while (!transfer->done()) pair.initiator.core->step(Clock::now());
      require(transfer->status());
    }));
}

void measure_engine(const std::vector<std::uint64_t>& counts, std::uint64_t most) {
  ScriptedNic nic(CorePair::devices(1));
  nic.complete_at_once();
  const auto start = [&nic](const char* name, const char* device) {
    EngineConfig config;
    config.name = name;
    config.verbs.devices = {device};
    return Engine::start(config, {make_verbs_transport(config.verbs, nic).value()}).value();
  };
  auto initiator = start("initiator", "a0");
  auto target = start("target", "b0");
  const auto local = initiator.allocate("kv", region_bytes(most)).value();
  static_cast<void>(target.allocate("kv", region_bytes(most)).value());
  const auto peer = initiator.connect(target.address()).value();
  const auto remote = initiator.find_region(peer, "kv").value();
  for (const std::uint64_t count : counts)
    print(measure("engine", count,
                  [&](std::span<const Slice> slices) { require(initiator.read(peer, local, remote, slices).wait()); }));
}

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    throw StatusError({Errc::invalid_argument, fmt::format("--output={}: not one of text, json", FLAGS_output)});
  if (FLAGS_iterations < 1 || FLAGS_slice_size < 1)
    throw StatusError({Errc::invalid_argument, "--iterations and --slice_size must be at least 1"});
  const auto counts = parse_size_list(FLAGS_slices);
  if (!counts) throw StatusError(counts.status().with_context("--slices"));
  const std::uint64_t most = *std::max_element(counts->begin(), counts->end());
  if (std::count(counts->begin(), counts->end(), 0) > 0)
    throw StatusError({Errc::invalid_argument, "--slices: a transfer needs at least one"});
  for (const std::string& path : split_list(FLAGS_path)) {
    if (path == "poller")
      measure_poller(*counts, most);
    else if (path == "engine")
      measure_engine(*counts, most);
    else
      throw StatusError({Errc::invalid_argument, fmt::format("--path={}: not one of poller, engine", path)});
  }
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("the cost of RDMA per slice over simulated devices that complete at once");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "verbs_cost: {}\n", e.what());
    return 2;
  }
}

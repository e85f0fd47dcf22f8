// Where packing begins to pay: the same bytes as many short slices, and packed into one.
//
//   staging_cost --transport shm --run_sizes 64,128,256,512,1K,2K --bytes 8M --runs 30 --output text|json
//
// Two engines in one process. Staged is pack, one slice, unpack, one after the other; the message that
// asks the source to pack is not part of it, so in earnest staging costs a round trip more.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/actors/engine.hpp>
#include <kvferry/kvcache/staging.hpp>

#include "bench/random.hpp"
#include "bench/sizes.hpp"

DEFINE_string(transport, "shm", "shm or tcp");
DEFINE_string(run_sizes, "64,128,256,512,1K,2K,4K", "bytes of one run: a size or a list");
DEFINE_string(bytes, "8M", "bytes of one transfer");
DEFINE_int32(runs, 30, "transfers of each kind per run size");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// Both engines with a region of KV bytes and a staging buffer each.
class Pair {
 public:
  explicit Pair(std::uint64_t bytes) : bytes_(bytes) {
    kv_ = initiator_.allocate("kv", 2 * bytes).value();
    staging_ = initiator_.allocate("staging", bytes).value();
    source_ = target_.allocate("kv", 2 * bytes).value();
    source_staging_ = target_.allocate("staging", bytes).value();
    peer_ = initiator_.connect(target_.address()).value();
    Random random(1);
    for (std::byte& byte : source_.bytes()) byte = static_cast<std::byte>(random.next());
  }

  void direct(const std::vector<Slice>& slices) { require(initiator_.read(peer_, kv_, "kv", slices).wait()); }

  void staged(const StagingRound& round) {
    require(pack(round, source_.bytes(), source_staging_.bytes()));
    const Slice slice = round.slice();
    require(initiator_.read(peer_, staging_, "staging", {&slice, 1}).wait());
    require(unpack(round, staging_.bytes(), kv_.bytes()));
  }

  void clear() { std::ranges::fill(kv_.bytes(), std::byte{0}); }
  bool arrived(const std::vector<Slice>& slices) const {
    return std::ranges::all_of(slices, [&](const Slice& slice) {
      return std::equal(kv_.data() + slice.local_offset, kv_.data() + slice.local_offset + slice.length,
                        source_.data() + slice.remote_offset);
    });
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  static EngineConfig config(std::string name) {
    EngineConfig config;
    config.name = std::move(name);
    config.transports = {FLAGS_transport};
    return config;
  }
  static void require(const Status& status) {
    if (!status) throw StatusError(status);
  }

  const std::uint64_t bytes_;
  // The initiator ends first, so it never sees its peer go.
  Engine target_ = Engine::start(config("target")).value();
  Engine initiator_ = Engine::start(config("initiator")).value();
  Region kv_, staging_, source_, source_staging_;
  Peer peer_;
};

/// Runs with gaps between, in another order on the other side.
std::vector<Slice> make_slices(std::uint64_t bytes, std::uint64_t run) {
  std::vector<Slice> slices(bytes / run);
  std::vector<std::uint64_t> places(slices.size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
  Random random(7);
  shuffle(places, random);
  for (std::size_t i = 0; i < slices.size(); ++i) slices[i] = {i * 2 * run, places[i] * 2 * run, run};
  return slices;
}

template <class Work>
double median_us(Work&& work) {
  std::vector<double> microseconds;
  for (int i = -3; i < FLAGS_runs; ++i) {
    const auto start = Clock::now();
    work();
    if (i >= 0) microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::ranges::sort(microseconds);
  return microseconds[microseconds.size() / 2];
}

void measure(Pair& pair, std::uint64_t run) {
  const std::vector<Slice> slices = make_slices(pair.bytes(), run);
  const StagedPlan staged =
      stage_plan(slices, Initiator::destination, {.threshold = run + 1, .buffer_bytes = pair.bytes() + run}).value();
  const StagingRound& round = staged.rounds.at(0);
  const double direct_us = median_us([&] { pair.direct(slices); });
  pair.clear();
  const double staged_us = median_us([&] { pair.staged(round); });
  if (!pair.arrived(slices)) throw StatusError({Errc::corrupted, "the bytes that arrived are wrong"});
  if (FLAGS_output == "json") {
    const nlohmann::ordered_json line = {{"transport", FLAGS_transport}, {"run_bytes", run},
                                         {"slices", slices.size()},      {"direct_p50_us", direct_us},
                                         {"staged_p50_us", staged_us},   {"gain", direct_us / staged_us}};
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print("{} runs of {:>5} B   {:>7} slices   direct {:>9.1f} us   staged {:>9.1f} us   gain {:>5.2f}\n",
               FLAGS_transport, run, slices.size(), direct_us, staged_us, direct_us / staged_us);
  }
  std::fflush(stdout);
}

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    throw StatusError({Errc::invalid_argument, fmt::format("--output={}: not one of text, json", FLAGS_output)});
  const auto sizes = parse_size_list(FLAGS_run_sizes);
  if (!sizes) throw StatusError(sizes.status().with_context("--run_sizes"));
  const auto bytes = parse_size_list(FLAGS_bytes);
  if (!bytes) throw StatusError(bytes.status().with_context("--bytes"));
  if (FLAGS_runs < 1 || std::ranges::min(*sizes) == 0 || std::ranges::max(*sizes) > bytes->front())
    throw StatusError({Errc::invalid_argument, "--runs and --run_sizes are at least 1, and no run exceeds --bytes"});
  Pair pair(bytes->front());
  for (const std::uint64_t size : *sizes) measure(pair, size);
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("short slices, and the same bytes packed through staging buffers");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "staging_cost: {}\n", e.what());
    return 2;
  }
}

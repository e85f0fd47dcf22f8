// How kvferry uses many rails: its own poller on simulated devices under a simulated clock. No speed of this machine is
// in the figures, and the same flags give the same figures.
//
//   rail_sim --rails 1,2,4,8 --block_size 4K,16K,64K,1M --op read --output text|json
//   rail_sim --lose port|peer      two rails, one of which is lost in the middle
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/runtime/log.hpp>

#include "bench/sizes.hpp"
#include "tests/support/rail_simulation.hpp"

DEFINE_string(rails, "1,2,4,8", "rails of 400 Gb/s: a number or a list");
DEFINE_string(block_size, "4K,16K,64K,1M", "bytes of a slice: a size or a list");
DEFINE_string(op, "read", "read or write");
DEFINE_uint64(blocks, 160, "slices of a transfer");
DEFINE_uint64(in_flight, 64, "transfers at a time");
DEFINE_uint64(request_ns, 0, "time of the poller's thread for each request; 0: it is never what holds up");
DEFINE_uint64(round_trip_ns, 2000, "from the last byte of a request to its completion");
DEFINE_uint32(timeout, 14, "as verbs.timeout: 4.096 us x 2^timeout until a packet without answer is repeated");
DEFINE_uint64(measured_us, 5000, "simulated time that is measured");
DEFINE_string(lose, "", "port: a port of ours goes down; peer: one of the target's, which shows in silence only");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

using test::RailLoad;
using test::RailSimulation;
using namespace std::chrono_literals;

RailLoad load_of(std::uint32_t rails, std::uint64_t block_bytes) {
  RailLoad load;
  load.rails = rails;
  load.block_bytes = block_bytes;
  load.blocks = FLAGS_blocks;
  load.in_flight = FLAGS_in_flight;
  load.op = FLAGS_op == "read" ? Op::read : Op::write;
  load.request_ns = FLAGS_request_ns;
  load.speed.round_trip_ns = FLAGS_round_trip_ns;
  load.speed.retry_ns = std::uint64_t{4096} << FLAGS_timeout;
  return load;
}

void require_all_ok(const RailSimulation& simulation) {
  if (!simulation.failures().empty()) throw StatusError(simulation.failures().front());
  if (!simulation.broken_rules().empty()) throw StatusError({Errc::internal, simulation.broken_rules().front()});
}

void print(const nlohmann::ordered_json& line, const std::string& text) {
  fmt::print("{}\n", FLAGS_output == "json" ? line.dump() : text);
  std::fflush(stdout);
}

void measure_share(std::uint32_t rails, std::uint64_t block_bytes) {
  RailSimulation simulation(load_of(rails, block_bytes));
  simulation.run_for(1ms);
  const double share = simulation.measure_share(std::chrono::microseconds(FLAGS_measured_us), rails);
  require_all_ok(simulation);
  print({{"rails", rails}, {"block_size", block_bytes}, {"op", FLAGS_op}, {"share", share}},
        fmt::format("{} rails   {:>5} blocks   {}   {:.3f} of what they can carry", rails, format_size(block_bytes),
                    FLAGS_op, share));
}

/// Says how much of one rail came through in each stretch of time since the loss.
void measure_loss(std::uint64_t block_bytes) {
  constexpr auto stretch = 10ms;
  constexpr int stretches = 60;
  RailSimulation simulation(load_of(2, block_bytes));
  simulation.run_for(1ms);
  const double before = simulation.measure_share(stretch, 2);
  if (FLAGS_lose == "port")
    simulation.lose_port(1);
  else
    simulation.lose_peer(1);
  int recovered_after = -1;
  double at_100_ms = 0;
  for (int i = 1; i <= stretches && (recovered_after < 0 || i <= 11); ++i) {
    const double share = simulation.measure_share(stretch, 1);
    if (share >= 0.95 && recovered_after < 0) recovered_after = i * 10;
    if (i == 11) at_100_ms = share;
  }
  // What was under way on the lost rail is given up when its packets have been repeated in vain for half a second.
  if (!simulation.finish(2s)) throw StatusError({Errc::timed_out, "some transfers have not ended"});
  require_all_ok(simulation);
  print({{"lose", FLAGS_lose},
         {"block_size", block_bytes},
         {"op", FLAGS_op},
         {"share_of_two_before", before},
         {"share_of_one_100_ms_after", at_100_ms},
         {"at_least_0.95_of_one_within_ms", recovered_after},
         {"transfers_ok", simulation.transfers_ok()},
         {"transfers_failed", simulation.failures().size()}},
        fmt::format("{} lost   {:>5} blocks   {}   before {:.3f} of two   100 ms after {:.3f} of one   0.95 of one "
                    "within {} ms   {} transfers ok, {} failed",
                    FLAGS_lose, format_size(block_bytes), FLAGS_op, before, at_100_ms, recovered_after,
                    simulation.transfers_ok(), simulation.failures().size()));
}

void refuse(const std::string& text) { throw StatusError({Errc::invalid_argument, text}); }

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    refuse(fmt::format("--output={}: not one of text, json", FLAGS_output));
  if (FLAGS_op != "read" && FLAGS_op != "write") refuse(fmt::format("--op={}: not one of read, write", FLAGS_op));
  if (!FLAGS_lose.empty() && FLAGS_lose != "port" && FLAGS_lose != "peer")
    refuse(fmt::format("--lose={}: not one of port, peer", FLAGS_lose));
  if (FLAGS_timeout > 31) refuse("--timeout: 0 to 31");
  if (FLAGS_blocks < 1 || FLAGS_in_flight < 1 || FLAGS_measured_us < 1)
    refuse("--blocks, --in_flight and --measured_us must be at least 1");
  const auto rails = parse_size_list(FLAGS_rails);
  if (!rails) throw StatusError(rails.status().with_context("--rails"));
  const auto sizes = parse_size_list(FLAGS_block_size);
  if (!sizes) throw StatusError(sizes.status().with_context("--block_size"));
  if (std::ranges::any_of(*rails, [](std::uint64_t count) { return count < 1 || count > 16; }))
    refuse("--rails: 1 to 16");
  if (std::ranges::count(*sizes, 0) > 0) refuse("--block_size: at least 1");
  // That a rail was lost is no news here.
  set_log_level(LogLevel::error);
  for (const std::uint64_t size : *sizes) {
    if (!FLAGS_lose.empty()) {
      measure_loss(size);
      continue;
    }
    for (const std::uint64_t count : *rails) measure_share(static_cast<std::uint32_t>(count), size);
  }
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("how kvferry uses many rails, on simulated devices under a simulated clock");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "rail_sim: {}\n", e.what());
    return 2;
  }
}

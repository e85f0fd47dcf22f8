// One transfer of very many slices: how long submission takes and how much memory it needs.
//
//   large_batch --slices 112000 --slice_size 4096 --pattern random|contiguous
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <sys/resource.h>

#include <kvferry/actors/engine.hpp>

DEFINE_int64(slices, 112000, "slices of the transfer");
DEFINE_int64(slice_size, 4096, "bytes per slice");
DEFINE_string(pattern, "random", "random or contiguous");
DEFINE_string(transport, "shm", "shm or tcp");
DEFINE_int32(runs, 5, "transfers");

namespace {

using namespace kvferry;

/// A line of /proc/self/status in bytes.
std::uint64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key)) return std::stoull(line.substr(key.size())) * 1024;
  return 0;
}

void reset_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

std::vector<Slice> make_slices() {
  const auto count = static_cast<std::size_t>(FLAGS_slices);
  const auto size = static_cast<std::uint64_t>(FLAGS_slice_size);
  std::vector<std::uint64_t> blocks(count);
  for (std::size_t i = 0; i < count; ++i) blocks[i] = i;
  if (FLAGS_pattern == "random") std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(7));
  std::vector<Slice> slices(count);
  for (std::size_t i = 0; i < count; ++i) slices[i] = {blocks[i] * size, blocks[i] * size, size};
  return slices;
}

int run() {
  if ((FLAGS_pattern != "random" && FLAGS_pattern != "contiguous") || FLAGS_slices < 1 || FLAGS_slice_size < 1 ||
      FLAGS_runs < 1)
    throw StatusError({Errc::invalid_argument,
                       "--pattern is random or contiguous; --slices, --slice_size and --runs are at least 1"});
  EngineConfig config;
  config.transports = {FLAGS_transport};
  config.name = "initiator";
  auto initiator = Engine::start(config).value();
  config.name = "target";
  auto target = Engine::start(config).value();
  const auto bytes = static_cast<std::uint64_t>(FLAGS_slices * FLAGS_slice_size);
  const auto local = initiator.allocate("kv", bytes).value();
  const auto source = target.allocate("kv", bytes).value();
  std::fill_n(local.data(), bytes, std::byte{1});
  std::fill_n(source.data(), bytes, std::byte{2});
  const auto peer = initiator.connect(target.address()).value();
  const auto remote = initiator.find_region(peer, "kv").value();
  const auto slices = make_slices();
  // One slice over everything first: pages that are mapped at their first touch are no memory of the batch.
  const Slice whole{0, 0, bytes};
  if (Status status = initiator.read(peer, local, remote, {&whole, 1}).wait(); !status.is_ok())
    throw StatusError(status);
  std::fill_n(local.data(), bytes, std::byte{1});

  std::vector<double> submit_ms;
  std::uint64_t extra = 0;
  for (int i = 0; i < FLAGS_runs; ++i) {
    reset_peak();
    const std::uint64_t before = status_bytes("VmRSS:");
    const auto start = Clock::now();
    const Transfer transfer = initiator.read(peer, local, remote, slices);
    submit_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    if (Status status = transfer.wait(); !status.is_ok()) throw StatusError(status);
    extra = std::max(extra, status_bytes("VmHWM:") - std::min(before, status_bytes("VmHWM:")));
  }
  if (!std::equal(local.data(), local.data() + bytes, source.data()))
    throw StatusError({Errc::corrupted, "the bytes that arrived are wrong"});
  std::sort(submit_ms.begin(), submit_ms.end());
  fmt::print(
      "{{\"slices\":{},\"pattern\":\"{}\",\"transport\":\"{}\",\"submit_ms_p50\":{:.3f},\"submit_ms_max\":{:.3f},"
      "\"peak_extra_mib\":{:.2f}}}\n",
      FLAGS_slices, FLAGS_pattern, FLAGS_transport, submit_ms[submit_ms.size() / 2], submit_ms.back(),
      static_cast<double>(extra) / (1 << 20));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("submission time and memory of one transfer with very many slices");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "large_batch: {}\n", e.what());
    return 2;
  }
}

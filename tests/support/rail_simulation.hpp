// A steady load on several rails under a simulated clock: kvferry's own poller cuts, spreads and repeats, the devices
// take the time that real ones of that speed would. The same input gives the same output.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/support/core_pair.hpp"

namespace kvferry::test {

struct RailLoad {
  std::uint32_t rails = 8;
  std::uint64_t block_bytes = 64 << 10;  ///< of one slice; no two touch
  std::size_t blocks = 160;              ///< of one transfer
  std::size_t in_flight = 64;            ///< transfers at a time
  Op op = Op::read;
  bool verify = false;           ///< move the bytes and compare them when a transfer has ended
  std::uint64_t poll_ns = 250;   ///< between two looks of the poller
  std::uint64_t request_ns = 0;  ///< of the poller's thread for each request; 0: as fast as it likes
  NicSpeed speed = {};
  VerbsConfig verbs = {};
};

class RailSimulation {
 public:
  /// Opens the rails and submits the first transfers. Throws StatusError when that fails.
  explicit RailSimulation(const RailLoad& load);

  void run_for(std::chrono::nanoseconds time);
  /// Bytes a second that came through, of what the rails can carry at this block size: their line rate, or their rate
  /// of operations where that is the smaller.
  double measure_share(std::chrono::nanoseconds time, std::uint32_t of_rails);
  double bytes_per_second(std::chrono::nanoseconds time);
  /// Submits nothing more and runs until what was submitted has ended; false when it has not after `limit`.
  bool finish(std::chrono::nanoseconds limit);

  /// The initiator's port of that rail goes down, and its device says so.
  void lose_port(std::uint32_t rail);
  /// The target's port goes down, which the initiator's device learns only from packets that nobody answers.
  void lose_peer(std::uint32_t rail);

  std::uint64_t transfers_ok() const noexcept { return ok_; }
  const std::vector<Status>& failures() const noexcept { return failures_; }
  std::uint64_t wrong_blocks() const noexcept { return wrong_; }
  const std::vector<std::pair<std::uint32_t, Status>>& rails_down() const noexcept { return pair_.initiator.down; }
  std::vector<std::string> broken_rules() const { return nic_.broken_rules(); }

 private:
  void fill();
  void step();
  void submit(std::size_t slot);
  void collect(std::size_t slot);

  const RailLoad load_;
  ScriptedNic nic_;
  CorePair pair_;
  std::vector<std::vector<Slice>> slices_;  ///< by slot
  std::vector<RefPtr<TransferState>> running_;
  bool finishing_ = false;
  std::uint64_t ok_ = 0;
  std::uint64_t wrong_ = 0;
  std::vector<Status> failures_;
};

}  // namespace kvferry::test

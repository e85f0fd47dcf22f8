// Measures one case after the other against a connected target.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kvferry/actors/benchmark.hpp>
#include <kvferry/actors/engine.hpp>

#include "bench/control.hpp"
#include "bench/floor.hpp"
#include "bench/latency_stats.hpp"
#include "bench/options.hpp"

namespace kvferry::bench {

/// What was measured of one case.
struct CaseResult {
  BenchCase bench_case;
  std::string transport;  ///< the one in use
  int num_rails = 1;
  std::uint64_t trips = 0;  ///< transfers completed
  double seconds = 0;       ///< of the timed sections together
  double average_us = 0;
  double p50_us = 0;
  double p99_us = 0;
  std::optional<bool> verified;  ///< nothing: not asked for
  std::string mismatch;          ///< the first wrong byte
  // ---- with --floor
  std::optional<double> floor_ratio;  ///< floor's median time / ours, per transfer
  double floor_p50_us = 0;
  std::string floor_name;

  double bytes() const noexcept {
    return static_cast<double>(trips) * static_cast<double>(bench_case.workload.transfer_bytes());
  }
  double mib_per_s() const noexcept { return seconds > 0 ? bytes() / seconds / (1 << 20) : 0; }
  /// Blocks per second.
  double ops_per_s() const noexcept {
    return seconds > 0 ? static_cast<double>(trips) * bench_case.workload.batch_size / seconds : 0;
  }
};

/// Runs cases in rounds: new data (untimed), trips (timed), every byte checked (untimed), trips of the
/// floor. A timed section goes from the submission to the return of wait(), nothing else. All calls from
/// one thread.
class BenchmarkRun {
 public:
  /// Told before every round.
  using ProgressFunction = std::function<void(const BenchCase&, std::uint32_t round, std::uint32_t rounds)>;

  /// Prepares regions for the largest of `cases` on both sides. The engine and `stop` must outlive the
  /// run; once `stop` is set (by any thread), the present trip ends, then the round.
  static Result<BenchmarkRun> create(Engine& engine, ControlClient control, const BenchOptions& options,
                                     const std::vector<BenchCase>& cases, const std::atomic<bool>& stop);

  BenchmarkRun(BenchmarkRun&&) noexcept;
  BenchmarkRun& operator=(BenchmarkRun&&) noexcept;
  ~BenchmarkRun();

  void on_progress(ProgressFunction progress);

  /// begin, step until it says false, result.
  Result<CaseResult> run(const BenchCase& bench_case);

  Status begin(const BenchCase& bench_case);
  /// One round. False after the last one, or once `stop` was set.
  Result<bool> step();
  CaseResult result() const;

  /// Tells the target that this was all.
  Status finish();

 private:
  class Impl;
  explicit BenchmarkRun(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A whole sweep, one round a step, for a benchmark actor.
class SweepJob : public BenchmarkJob {
 public:
  /// `report` is called with each case's result as soon as it is there, on the actor's thread.
  SweepJob(BenchmarkRun run, std::vector<BenchCase> cases, std::function<void(const CaseResult&)> report,
           const std::atomic<bool>& stop)
      : run_(std::move(run)), cases_(std::move(cases)), report_(std::move(report)), stop_(stop) {}

  /// False after the last round of the last case, or once `stop` was set and the case begun was reported.
  Result<bool> step() override;

 private:
  BenchmarkRun run_;
  std::vector<BenchCase> cases_;
  std::function<void(const CaseResult&)> report_;
  const std::atomic<bool>& stop_;
  std::size_t next_ = 0;  ///< case
  bool in_case_ = false;
};

/// The transport that carries host memory to the peer: the first that its description names.
std::string transport_in_use(const Peer& peer);

}  // namespace kvferry::bench

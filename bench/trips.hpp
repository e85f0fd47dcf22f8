// The timed loops: transfers one after the other, or several in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include <kvferry/actors/engine.hpp>

#include "bench/control.hpp"
#include "bench/latency_stats.hpp"
#include "bench/options.hpp"

namespace kvferry::bench {

/// Issues the transfers of one case. A lane is one of the transfers in flight together.
class TripIssuer {
 public:
  virtual ~TripIssuer() = default;
  virtual std::uint32_t lanes() const = 0;
  virtual void submit(std::uint32_t lane) = 0;
  virtual Status wait(std::uint32_t lane) = 0;
};

/// What a timed section did.
struct TimedSection {
  std::uint64_t trips = 0;
  double seconds = 0;
};

/// Keeps all lanes busy from this thread until a limit is reached or `stop` is set; at least one trip.
/// With several lanes the oldest is waited for first. One thread serves all lanes: submitting costs
/// under a microsecond, and a second one would only take a core from the pollers.
Result<TimedSection> run_trips(TripIssuer& issuer, const TripLimits& limits, const std::atomic<bool>& stop,
                               LatencyStats& stats);

/// read, write and write_imm. Slices are made beforehand. Immediates count up from 0.
class OneSidedTrips : public TripIssuer {
 public:
  OneSidedTrips(Engine& engine, Peer peer, Region local, RemoteHandle remote, const BenchCase& bench_case);

  std::uint32_t lanes() const override { return static_cast<std::uint32_t>(slices_.size()); }
  void submit(std::uint32_t lane) override;
  Status wait(std::uint32_t lane) override { return transfers_[lane].wait(); }

  /// write_imm transfers so far, warm-up included.
  std::uint64_t notifications() const noexcept { return notifications_; }

 private:
  Engine& engine_;
  Peer peer_;
  Region local_;
  RemoteHandle remote_;
  BenchOp op_;
  std::vector<std::vector<Slice>> slices_;
  std::vector<Transfer> transfers_;
  std::uint64_t notifications_ = 0;
};

/// sendrecv: a batch of messages goes to the target, which sends every one back.
class EchoTrips : public TripIssuer {
 public:
  EchoTrips(Engine& engine, Peer outgoing, Peer incoming, const BenchCase& bench_case);

  std::uint32_t lanes() const override { return static_cast<std::uint32_t>(lanes_.size()); }
  void submit(std::uint32_t lane) override;
  Status wait(std::uint32_t lane) override;

  /// New contents for every message.
  void fill(std::uint64_t round);
  /// Forgets what came back.
  void poison_echoes();
  /// Empty when every echo of the last trips is what was sent.
  std::string verify(std::uint64_t round) const;

 private:
  struct Lane {
    std::vector<std::byte> sent;
    std::vector<std::byte> echoed;
    std::vector<Transfer> sends;
    std::vector<Transfer> receives;
  };

  std::span<std::byte> message(std::vector<std::byte>& batch, std::uint32_t index) const;

  Engine& engine_;
  Peer outgoing_;
  Peer incoming_;
  Workload workload_;
  std::vector<Lane> lanes_;
};

}  // namespace kvferry::bench

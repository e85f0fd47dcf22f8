// Whole engines for tests, connected in pairs, and the memory patterns that they move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/engine.hpp>
#include <kvferry/transports/fault.hpp>
#include <kvferry/transports/transport.hpp>

#include "tests/support/timing.hpp"

namespace kvferry::test {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kib = 1024;
inline constexpr std::uint64_t mib = 1024 * kib;
inline constexpr std::uint64_t gib = 1024 * mib;

/// Listens on a free loopback port and uses one transport alone ("tcp" or "shm"; empty: both).
EngineConfig config_of(const std::string& name, const std::string& transport = {});

/// A fresh transport of the kind, as the engine would make it.
std::shared_ptr<Transport> make_transport(const std::string& kind);

/// An engine, or a StatusError, which fails the test.
Engine start(EngineConfig config, std::vector<std::shared_ptr<Transport>> transports = {});

/// Two engines of this process, the initiator connected to the target.
struct Pair {
  explicit Pair(const std::string& transport);
  Pair(EngineConfig target_config, EngineConfig initiator_config,
       std::vector<std::shared_ptr<Transport>> initiator_transports = {});

  Engine target;
  Engine initiator;
  Peer peer;  ///< the target, as the initiator knows it
};

/// A pair whose initiator's transport misbehaves as `plan` says; its target is sound.
struct FaultyPair {
  explicit FaultyPair(const std::string& transport);
  FaultyPair(const std::string& transport, EngineConfig target_config, EngineConfig initiator_config);

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  Pair pair;
};

/// Fills memory with the pattern `seed`, as if the first byte stood at `offset` (a multiple of 8).
void fill(std::span<std::byte> memory, std::uint64_t seed, std::uint64_t offset = 0);
/// How many bytes differ from that pattern.
std::size_t wrong_bytes(std::span<const std::byte> memory, std::uint64_t seed, std::uint64_t offset = 0);
std::size_t nonzero_bytes(std::span<const std::byte> memory);

/// What memory holds now; says later whether any of it has changed.
class Snapshot {
 public:
  explicit Snapshot(std::span<const std::byte> memory) : memory_(memory), then_(memory.begin(), memory.end()) {}
  std::size_t changed_bytes() const;

 private:
  std::span<const std::byte> memory_;
  std::vector<std::byte> then_;
};

/// `count` slices of `length` bytes that scatter a region of count * length bytes over another one: all
/// of both is used exactly once, and no two neighbours merge except by chance.
std::vector<Slice> shuffled_slices(std::size_t count, std::uint64_t length, std::uint32_t seed);

/// Calls `condition` until it holds; false after `limit`.
template <class Condition>
bool eventually(Duration limit, Condition&& condition) {
  const TimePoint until = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

std::uint64_t counter(const Engine& engine, const std::string& name);

/// The transports by which parameterised tests are named.
inline auto each_transport() { return ::testing::Values("tcp", "shm"); }
inline std::string transport_name(const ::testing::TestParamInfo<const char*>& info) { return info.param; }

}  // namespace kvferry::test

#include "tests/e2e/engines.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <kvferry/transports/shm/shm_transport.hpp>
#include <kvferry/transports/tcp/tcp_transport.hpp>

namespace kvferry::test {
namespace {

// SplitMix64: every word differs from its neighbours and from the same word of another seed.
std::uint64_t word_of(std::uint64_t seed, std::uint64_t index) noexcept {
  std::uint64_t z = (seed << 32) + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::vector<std::shared_ptr<Transport>> faulty(const std::string& transport, std::shared_ptr<FaultPlan> plan) {
  // Under its own name, so that the sound transport of the peer matches it.
  return {make_fault_transport(make_transport(transport), std::move(plan), transport)};
}

}  // namespace

EngineConfig config_of(const std::string& name, const std::string& transport) {
  EngineConfig config;
  config.name = name;
  if (!transport.empty()) config.transports = {transport};
  return config;
}

std::shared_ptr<Transport> make_transport(const std::string& kind) {
  return kind == "shm" ? make_shm_transport(ShmConfig{}) : make_tcp_transport(TcpConfig{});
}

Engine start(EngineConfig config, std::vector<std::shared_ptr<Transport>> transports) {
  return Engine::start(std::move(config), std::move(transports)).value();
}

Pair::Pair(const std::string& transport) : Pair(config_of("target", transport), config_of("initiator", transport)) {}

Pair::Pair(EngineConfig target_config, EngineConfig initiator_config,
           std::vector<std::shared_ptr<Transport>> initiator_transports)
    : target(start(std::move(target_config))),
      initiator(start(std::move(initiator_config), std::move(initiator_transports))),
      peer(initiator.connect(target.address()).value()) {}

FaultyPair::FaultyPair(const std::string& transport)
    : FaultyPair(transport, config_of("target", transport), config_of("initiator", transport)) {}

FaultyPair::FaultyPair(const std::string& transport, EngineConfig target_config, EngineConfig initiator_config)
    : pair(std::move(target_config), std::move(initiator_config), faulty(transport, plan)) {}

void fill(std::span<std::byte> memory, std::uint64_t seed, std::uint64_t offset) {
  for (std::size_t at = 0; at < memory.size(); at += 8) {
    const std::uint64_t word = word_of(seed, (offset + at) / 8);
    std::memcpy(memory.data() + at, &word, std::min<std::size_t>(8, memory.size() - at));
  }
}

std::size_t wrong_bytes(std::span<const std::byte> memory, std::uint64_t seed, std::uint64_t offset) {
  std::size_t wrong = 0;
  for (std::size_t at = 0; at < memory.size(); at += 8) {
    const std::uint64_t word = word_of(seed, (offset + at) / 8);
    const std::size_t length = std::min<std::size_t>(8, memory.size() - at);
    if (std::memcmp(memory.data() + at, &word, length) == 0) continue;
    const auto* expected = reinterpret_cast<const std::byte*>(&word);
    for (std::size_t i = 0; i < length; ++i) wrong += memory[at + i] != expected[i];
  }
  return wrong;
}

std::size_t nonzero_bytes(std::span<const std::byte> memory) {
  return memory.size() - static_cast<std::size_t>(std::count(memory.begin(), memory.end(), std::byte{0}));
}

std::size_t Snapshot::changed_bytes() const {
  if (std::memcmp(memory_.data(), then_.data(), then_.size()) == 0) return 0;
  std::size_t changed = 0;
  for (std::size_t i = 0; i < then_.size(); ++i) changed += memory_[i] != then_[i];
  return changed;
}

std::vector<Slice> shuffled_slices(std::size_t count, std::uint64_t length, std::uint32_t seed) {
  std::vector<std::uint64_t> places(count);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937(seed));
  std::vector<Slice> slices(count);
  for (std::size_t i = 0; i < count; ++i) slices[i] = {i * length, places[i] * length, length};
  return slices;
}

std::uint64_t counter(const Engine& engine, const std::string& name) { return engine.metrics().counters.at(name); }

}  // namespace kvferry::test

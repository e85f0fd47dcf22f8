// The serving side of transfer_bench.
#pragma once

#include <atomic>

#include <kvferry/actors/engine.hpp>

namespace kvferry::bench {

/// Serves every initiator that connects to `engine`, each with a region of its own, until `stop`.
void serve_initiators(Engine& engine, const std::atomic<bool>& stop);

}  // namespace kvferry::bench

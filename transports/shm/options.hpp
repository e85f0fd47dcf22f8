// What tests replace in the shared-memory transport.
#pragma once

#include <kvferry/transports/shm/peer_memory.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::shm {

struct Options {
  ProcessMemoryCalls calls{};
  /// How long a connection may take to show a valid token.
  Duration hello_limit = std::chrono::seconds(5);
  /// False: engine-allocated regions are given out like foreign memory too.
  bool map_regions = true;
};

}  // namespace kvferry::shm

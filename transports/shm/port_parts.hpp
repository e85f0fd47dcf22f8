// What the channels and the server of one Port have in common.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/completion_list.hpp>
#include <kvferry/transports/shm/copy_pool.hpp>
#include <kvferry/transports/shm/epoll_set.hpp>
#include <kvferry/transports/shm/options.hpp>
#include <kvferry/transports/shm/protocol.hpp>

namespace kvferry::shm {

struct PortParts {
  PortParts(const ShmConfig& shm_config, const Options& port_options, const PortContext& port_context,
            PortEvents& port_events)
      : config(shm_config), options(port_options), context(port_context), events(port_events) {}

  const ShmConfig config;
  const Options options;
  const PortContext context;
  PortEvents& events;
  EpollSet epoll;
  std::unique_ptr<CopyPool> pool;  ///< only with ShmConfig::copy_threads
  std::vector<Channel*> active;    ///< channels with items to copy now
  ItemQueue shared;                ///< copied with waiters, some of whom may still be inside
  CompletionList finished;         ///< not reported yet
  std::size_t outstanding = 0;     ///< items taken and not finished
  bool channel_ended = false;      ///< some channel waits to be reported as down
  std::vector<std::byte> packet = std::vector<std::byte>(receive_buffer_bytes);
};

}  // namespace kvferry::shm

// The shared-memory transport: two engines under one kernel, host memory.
#pragma once

#include <memory>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

std::shared_ptr<Transport> make_shm_transport(const ShmConfig& config);

}  // namespace kvferry

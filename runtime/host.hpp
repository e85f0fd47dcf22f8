// Which host an engine runs on: what decides whether two engines can share memory.
#pragma once

#include <string>

namespace kvferry {

/// Host facts that decide whether a transport can join two engines.
struct HostFacts {
  std::string host_id;  ///< equal exactly for processes under one running kernel
};

/// The facts of this process. The id is the kernel's boot id, which all containers of one kernel
/// see and images never carry; KVFERRY_HOST_ID replaces it. Where neither can be read it is a random
/// value, so that such an engine never takes a stranger for a neighbour. Any thread.
HostFacts local_host();

}  // namespace kvferry

// The one place that knows CAF's version: includes, message types and the few calls that change
// between CAF 0.17 and 1.x. Included by the actors' own files only, never by a public header.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>
#include <caf/actor_system_config.hpp>
#include <caf/after.hpp>
#include <caf/blocking_actor.hpp>
#include <caf/event_based_actor.hpp>
#include <caf/others.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <kvferry/actors/peer_table.hpp>
#include <kvferry/actors/poller_core.hpp>
#include <kvferry/runtime/messages.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {

using PeerPtr = std::shared_ptr<PeerRecord>;

// ---- to a poller
struct OpenRail {
  std::uint32_t peer = 0;
  RailSpec spec;
};
struct ClosePeer {
  std::uint32_t peer = 0;
  Status why;
};
struct ReleaseRegion {
  RegionKey region;
  std::shared_ptr<std::promise<void>> done;
};
struct DropSession {
  SessionId session = 0;
};
/// The peer's answer to a port's request.
struct AnswerPort {
  std::string transport;
  ChannelId channel = 0;
  Result<std::string> answer;
};
/// A peer's port asks one of this engine's; `answer` may be called on any thread, once.
struct ServePort {
  std::string transport;
  std::string address;
  std::string request;
  std::function<void(Result<std::string>)> answer;
};
struct StopPoller {
  Status why;
};

// ---- to the scheduler
struct RailPlan {
  std::uint32_t group = 0;
  RailSpec spec;
};
struct AddPeer {
  PeerPtr peer;
  std::vector<RailPlan> rails;
  caf::actor endpoint;
};
struct RemovePeer {
  std::uint32_t peer = 0;
  Status why;
};
struct RailReport {
  std::uint32_t group = 0;
  std::uint32_t peer = 0;
  std::uint32_t rail = 0;
  bool up = false;
  Status why;
};
struct ReopenRail {
  std::uint32_t peer = 0;
  std::uint32_t rail = 0;
};
struct AskPort {
  std::uint32_t group = 0;
  PortRequest request;
};
struct Orphan {
  std::uint32_t group = 0;
  RefPtr<TransferState> transfer;
  Status why;
};
struct SplitTransfer {
  RefPtr<TransferState> transfer;
  PeerPtr peer;
};
/// An ordinary message, so that the transfers in the mailbox before it are still dealt with.
struct StopScheduler {};

// ---- to an endpoint
using ConnectPromise = std::shared_ptr<std::promise<Result<PeerPtr>>>;
using RegionPromise = std::shared_ptr<std::promise<Result<std::shared_ptr<const RemoteRegion>>>>;
struct ConnectRequest {
  ConnectPromise answer;
};
struct ControlArrived {
  ControlMessage message;
};
/// The control message could not be read, or the peer's schema is another.
struct ControlRefused {
  Status why;
};
struct RailsChanged {
  std::uint32_t peer = 0;
  bool up = false;       ///< at least one rail is up
  bool settled = false;  ///< no rail that is still being tried would be better
  Status why;            ///< when none is up: the last error
};
struct SubmitSlowly {
  RefPtr<TransferState> transfer;
  PeerPtr peer;
  std::string region;  ///< empty when the transfer knows its remote region
};
struct FindRegion {
  PeerPtr peer;
  std::string name;
  RegionPromise answer;
};
/// A port of the group has something to ask the peer's port.
struct RelayRequest {
  caf::actor poller;
  PortRequest request;
};
struct Disconnect {
  PeerPtr peer;
};
struct HeartbeatTick {
  bool once = false;  ///< an extra look: no further beat follows from it
};
struct ParkedExpired {
  std::uint64_t id = 0;
  bool if_lost = false;  ///< only if its peer is still lost
};
struct HandshakeExpired {
  std::uint64_t round = 0;
};
struct StopEndpoint {
  Status why;
};

// ---- to the bootstrap actor
struct Dial {
  std::uint64_t line = 0;
  std::string address;
  caf::actor endpoint;
};
struct SendControl {
  std::uint64_t line = 0;
  std::string bytes;
};
/// The answer of a port to a peer that waits for it.
struct PortAnswered {
  std::string routing;  ///< ZeroMQ's name of the peer's connection
  std::uint64_t id = 0;
  Result<std::string> answer;
};
struct HangUp {
  std::uint64_t line = 0;
};
struct StopBootstrap {};

// ---- to the callback actor
struct CallbackTask {
  std::function<void()> run;
};
struct StopCallbacks {};

// ---- to the lease actor
struct WatchLease {
  RegionKey lease;
  TimePoint end;
};
struct StopLeases {};

}  // namespace kvferry

// All of these stay inside one process and are never serialized.
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::OpenRail)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ClosePeer)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ReleaseRegion)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::DropSession)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::AnswerPort)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ServePort)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::AskPort)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::RelayRequest)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::PortAnswered)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopPoller)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::AddPeer)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::RemovePeer)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::RailReport)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ReopenRail)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::Orphan)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::SplitTransfer)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopScheduler)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ConnectRequest)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ControlArrived)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ControlRefused)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::RailsChanged)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::SubmitSlowly)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::FindRegion)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::Disconnect)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::HeartbeatTick)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::ParkedExpired)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::HandshakeExpired)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopEndpoint)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::Dial)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::SendControl)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::HangUp)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopBootstrap)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::CallbackTask)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopCallbacks)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::WatchLease)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopLeases)

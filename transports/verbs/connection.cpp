#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include <kvferry/transports/verbs/connection.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::uint32_t wanted_inline = 64;  // the heads of messages
constexpr std::uint32_t wanted_pieces = 16;  // of one request
constexpr std::uint8_t hop_limit = 64;
// 7 repeats for ever: a receiver that is not ready is a peer whose engine is busy, and its end shows elsewhere.
constexpr std::uint8_t receiver_not_ready_retries = 7;
constexpr std::uint32_t psn_mask = 0xffffff;

std::uint32_t random_psn() {
  std::random_device device;
  return device() & psn_mask;
}

ibv_ah_attr way_to(const PairRoute& route, std::uint8_t port, const VerbsConfig& config) {
  if (route.resolved) return route.resolved->way;
  ibv_ah_attr way{};
  way.port_num = port;
  way.dlid = route.lid;
  way.sl = static_cast<std::uint8_t>(config.service_level);
  if (!route.global) return way;
  way.is_global = 1;
  std::memcpy(way.grh.dgid.raw, route.gid.data(), route.gid.size());
  way.grh.sgid_index = static_cast<std::uint8_t>(route.gid_index);
  way.grh.hop_limit = hop_limit;
  way.grh.traffic_class = static_cast<std::uint8_t>(config.traffic_class);
  return way;
}

}  // namespace

ibv_mtu mtu_code(std::uint32_t bytes) noexcept {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

Result<std::unique_ptr<QueuePair>> QueuePair::create(const Device& device, const PairSpec& spec) {
  const ibv_device_attr& limits = device.context->limits();
  std::unique_ptr<QueuePair> made(new QueuePair(device));
  ibv_qp_init_attr attributes{};
  attributes.send_cq = spec.queue;
  attributes.recv_cq = spec.queue;
  attributes.srq = spec.receives;
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = std::min(spec.depth, static_cast<std::uint32_t>(limits.max_qp_wr));
  attributes.cap.max_send_sge = std::min(wanted_pieces, static_cast<std::uint32_t>(limits.max_sge));
  attributes.cap.max_inline_data = wanted_inline;
  const std::uint32_t depth = attributes.cap.max_send_wr;
  made->pair_ = device.context->api().create_qp(device.context->domain(), &attributes);
  if (made->pair_ == nullptr) {
    // A device that sends nothing inline refuses to be asked for it.
    attributes.cap.max_inline_data = 0;
    made->pair_ = device.context->api().create_qp(device.context->domain(), &attributes);
  }
  if (made->pair_ == nullptr)
    return {
        Errc::resource_exhausted,
        fmt::format("verbs: a queue pair of {} requests on {}: {} (the device has room for {} pairs of {} requests)",
                    depth, device.facts.name(), std::strerror(errno), limits.max_qp, limits.max_qp_wr)};
  made->depth_ = depth;
  made->max_inline_ = attributes.cap.max_inline_data;
  made->max_pieces_ = std::max(1u, std::min(attributes.cap.max_send_sge, wanted_pieces));
  made->psn_ = random_psn();
  if (Status status = made->to_init(); !status) return status;
  return made;
}

QueuePair::~QueuePair() {
  if (pair_ != nullptr) device_.context->api().destroy_qp(pair_);
}

Status QueuePair::modify(ibv_qp_attr& attributes, int mask, std::string_view to) {
  const int error = device_.context->api().modify_qp(pair_, &attributes, mask);
  if (error == 0) return {};
  return {Errc::channel_error, fmt::format("verbs: queue pair {} of {} to {}: {}", pair_->qp_num, device_.facts.name(),
                                           to, std::strerror(error > 0 ? error : errno))};
}

Status QueuePair::to_init() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_.facts.port;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  return modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
}

Status QueuePair::connect(const PairRoute& route, const VerbsConfig& config) {
  if (Status status = to_receive(route, config); !status) return status;
  return to_send(route, config);
}

Status QueuePair::to_receive(const PairRoute& route, const VerbsConfig& config) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = mtu_code(route.mtu);
  attributes.dest_qp_num = route.peer.number;
  attributes.rq_psn = route.peer.psn & psn_mask;
  attributes.max_dest_rd_atomic = static_cast<std::uint8_t>(route.reads_served);
  attributes.min_rnr_timer = static_cast<std::uint8_t>(config.rnr_timer);
  attributes.ah_attr = way_to(route, device_.facts.port, config);
  return modify(attributes,
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                "RTR");
}

Status QueuePair::to_send(const PairRoute& route, const VerbsConfig& config) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = static_cast<std::uint8_t>(config.timeout);
  attributes.retry_cnt = static_cast<std::uint8_t>(config.retries);
  attributes.rnr_retry = receiver_not_ready_retries;
  attributes.sq_psn = route.resolved ? route.resolved->psn : psn_;
  attributes.max_rd_atomic = static_cast<std::uint8_t>(route.reads_out);
  return modify(
      attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
      "RTS");
}

void QueuePair::fail() noexcept {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  device_.context->api().modify_qp(pair_, &attributes, IBV_QP_STATE);
}

}  // namespace kvferry::verbs

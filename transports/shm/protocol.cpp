#include <algorithm>

#include <kvferry/transports/shm/protocol.hpp>

namespace kvferry::shm {

PacketText PacketText::of(const Status& status) {
  PacketText packet;
  packet.code = static_cast<std::uint16_t>(status.code());
  packet.size = static_cast<std::uint16_t>(std::min(status.text().size(), packet.text.size()));
  std::copy_n(status.text().begin(), packet.size, packet.text.begin());
  return packet;
}

Status PacketText::status() const {
  if (code == 0) return {};
  const bool known = code <= static_cast<std::uint16_t>(Errc::internal);
  return {known ? static_cast<Errc>(code) : Errc::malformed,
          std::string(text.data(), std::min<std::size_t>(size, text.size()))};
}

std::optional<PacketHeader> header_of(std::span<const std::byte> packet) noexcept {
  if (packet.size() < sizeof(PacketHeader)) return std::nullopt;
  PacketHeader header;
  std::memcpy(&header, packet.data(), sizeof header);
  return header;
}

}  // namespace kvferry::shm

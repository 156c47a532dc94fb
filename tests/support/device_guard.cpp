// torch's own, for the device "cuda" where there is none: one device, and nothing to do to be on it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
}  // namespace
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

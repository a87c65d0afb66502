// Memory for what stays as long as a model: weights and keys, on huge pages where the system grants them.
//
// A step reads all weights once. With pages of 4 KB it waits for their addresses as much as for them.

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <utility>

#include "operators.h"

namespace choral {
namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20, REGION = size_t{32} << 20, ALIGNMENT = 64;

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

// Zeroed memory from the system that begins and ends with a huge page; what is handed out goes on living with it.
class Region {
 public:
  explicit Region(size_t size) : mapped_(rounded(size, HUGE_PAGE) + HUGE_PAGE) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base_ != MAP_FAILED, "cannot allocate ", size, " bytes");
    begin_ = rounded(reinterpret_cast<uintptr_t>(base_), HUGE_PAGE);
    end_ = begin_ + rounded(size, HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    madvise(reinterpret_cast<void*>(begin_), end_ - begin_, MADV_HUGEPAGE);  // a wish; small pages serve as well
#endif
  }
  Region(const Region&) = delete;
  ~Region() { munmap(base_, mapped_); }

  bool fits(size_t size) const { return size <= end_ - begin_; }
  void* take(size_t size) { return reinterpret_cast<void*>(std::exchange(begin_, begin_ + rounded(size, ALIGNMENT))); }

 private:
  size_t mapped_;
  void* base_;
  uintptr_t begin_, end_;
};

// Small tensors lie in one region, one after the other; a large one has its own.
std::pair<std::shared_ptr<Region>, void*> allocate(size_t size) {
  static std::mutex mutex;
  static std::shared_ptr<Region> common;
  if (size > REGION / 2) {
    auto own = std::make_shared<Region>(size);
    return {own, own->take(size)};
  }
  const std::lock_guard guard(mutex);
  if (!common || !common->fits(size)) common = std::make_shared<Region>(REGION);
  return {common, common->take(size)};
}

}  // namespace

// Zeros in memory that is meant to be kept, all of it there at once: a region is given back when its tensors are gone,
// but for the one that small tensors come from at the time.
at::Tensor lasting_zeros(at::IntArrayRef size, at::ScalarType dtype) {
  const auto options = at::TensorOptions(dtype);
  const size_t bytes = c10::multiply_integers(size) * c10::elementSize(dtype);
  if (bytes == 0) return at::zeros(size, options);
  const auto [region, address] = allocate(bytes);
  return at::from_blob(address, size, [region = region](void*) {}, options).zero_();
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def("lasting_zeros(int[] size, ScalarType dtype) -> Tensor", lasting_zeros);
}

}  // namespace choral

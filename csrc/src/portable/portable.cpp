// Replacements of names that the compiler's headers use and that libraries of older systems lack.
// build_portable.py links them, and renames the references.
#include <new>

#define EXL_PORTABLE extern "C" __attribute__((visibility("hidden")))

// glibc 2.32. False means that other threads may exist: reference counts are then always atomic.
extern "C" {
__attribute__((visibility("hidden"))) char exl_portable_single_threaded = 0;
}

// GCC 11: size of a new[] that overflows.
EXL_PORTABLE [[noreturn]] void exl_portable_bad_array_length() {
    throw std::bad_array_new_length();
}

// GCC 11 exports the two functions below. Before, only the copy constructor and the destructor of
// exception_ptr were exported, which call them. An exception_ptr is one pointer.
extern "C" void copy_exception(void** self, void* const* other) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_"
);
extern "C" void destroy_exception(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// exception_ptr::_M_addref. The copy is never destroyed, so its reference stays.
EXL_PORTABLE void exl_portable_add_reference(void** self) {
    void* copy = nullptr;
    copy_exception(&copy, self);
}

// exception_ptr::_M_release.
EXL_PORTABLE void exl_portable_release(void** self) {
    destroy_exception(self);
    *self = nullptr;
}

/* A plugin of qemu 7.2: how often each block of instructions ran, as lines "address instructions times" in the file
   that the option out names. Its own declarations: Debian has no header of plugins. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int operation, void* counter, uint64_t add);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void*), void*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static struct block {
    uint64_t address, instructions, times;
    struct block* before;
} * last;
static const char* out;

static void translate(plugin_id id, struct qemu_plugin_tb* tb) {
    struct block* block = malloc(sizeof *block);
    (void)id;
    *block = (struct block){qemu_plugin_tb_vaddr(tb), qemu_plugin_tb_n_insns(tb), 0, last};
    last = block;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, 0 /* add */, &block->times, 1);
}

static void finish(plugin_id id, void* data) {
    FILE* file = fopen(out, "w");
    (void)id, (void)data;
    if (!file) abort();
    for (const struct block* b = last; b; b = b->before)
        if (b->times)
            fprintf(file, "%llx %llu %llu\n", (unsigned long long)b->address, (unsigned long long)b->instructions,
                    (unsigned long long)b->times);
    fclose(file);
}

__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const void* info, int argc, char** argv) {
    (void)info;
    if (argc != 1 || strncmp(argv[0], "out=", 4) != 0) return 1;
    out = argv[0] + 4;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_atexit_cb(id, finish, NULL);
    return 0;
}

/* Calls of a process that fail as they are told to, for tests of what Python does not do itself (SQLite): LD_PRELOAD it, with TESTS_FAILING_CALLS naming a
   file of one line, `call path errno times seconds`: the next `times` calls of a path that has this text in it take so many seconds longer, and fail where the
   number is not 0. Calls: open, read, write, sync, remove. What was done stands in the file with `.done` behind its name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int told(const char *call, const char *path) {
    const char *by = getenv("TESTS_FAILING_CALLS");
    char named[16], text[256], done[512];
    int number, times, seconds, kept = errno;
    FILE *file = by ? fopen(by, "r") : NULL;
    if (!file) { errno = kept; return 0; }
    int found = fscanf(file, "%15s %255s %d %d %d", named, text, &number, &times, &seconds);
    fclose(file);
    errno = kept;
    if (found != 5 || times <= 0 || strcmp(call, named) || !strstr(path, text)) return 0;
    if ((file = fopen(by, "w"))) { fprintf(file, "%s %s %d %d %d\n", named, text, number, times - 1, seconds); fclose(file); }
    snprintf(done, sizeof done, "%s.done", by);
    if ((file = fopen(done, "a"))) { fprintf(file, "%s %s\n", call, path); fclose(file); }
    if (seconds) sleep(seconds);
    errno = number ? number : kept;
    return number;
}

static int told_of(const char *call, int descriptor) {
    char link[64], path[1024];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (size < 0) return 0;
    path[size] = 0;
    return told(call, path);
}

int fsync(int d) { return told_of("sync", d) ? -1 : REAL(fsync)(d); }
int fdatasync(int d) { return told_of("sync", d) ? -1 : REAL(fdatasync)(d); }
ssize_t write(int d, const void *b, size_t n) { return told_of("write", d) ? -1 : REAL(write)(d, b, n); }
ssize_t pwrite(int d, const void *b, size_t n, off_t o) { return told_of("write", d) ? -1 : REAL(pwrite)(d, b, n, o); }
ssize_t pwrite64(int d, const void *b, size_t n, off64_t o) { return told_of("write", d) ? -1 : REAL(pwrite64)(d, b, n, o); }
ssize_t read(int d, void *b, size_t n) { return told_of("read", d) ? -1 : REAL(read)(d, b, n); }
ssize_t pread(int d, void *b, size_t n, off_t o) { return told_of("read", d) ? -1 : REAL(pread)(d, b, n, o); }
ssize_t pread64(int d, void *b, size_t n, off64_t o) { return told_of("read", d) ? -1 : REAL(pread64)(d, b, n, o); }
int unlink(const char *p) { return told("remove", p) ? -1 : REAL(unlink)(p); }
int open(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t mode = (f & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; va_end(rest);
    return told("open", p) ? -1 : REAL(open)(p, f, mode);
}
int open64(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t mode = (f & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; va_end(rest);
    return told("open", p) ? -1 : REAL(open64)(p, f, mode);
}

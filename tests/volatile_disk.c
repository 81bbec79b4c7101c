/* A disk with a page cache, below a process that does not know of it: LD_PRELOAD it (volatile_disk.py does). What is written below the folder TESTS_VOLATILE_OF is there
   as always: that is the page cache. What of it is on the disk stands in the folder TESTS_VOLATILE_DISK, on the same file system:

   blocks/INODE   what the disk has of a file         dropped/INODE  a byte for each page: 1 where a sync failed, so that the kernel calls it clean, and never writes it
   names/…        an empty file for each name on the disk, `INODE PATH` with `%` for `/`         kept/INODE   the file itself, so that its number is not used again

   A sync brings all pages of a file to its blocks that differ, but those that were dropped, and its name; one of a folder the names in it. A sync that fails brings some pages
   there, and drops the others (of a hundred as many as the first number of TESTS_VOLATILE_SHARES says); of these it forgets some (the second number), so that the file reads as the disk has it. A page that is written again is dropped no more. A folder that is renamed is so on
   the disk at once.

   Calls fail as a line each of the file TESTS_VOLATILE_FAULTS tells, `call path errno skip times seconds`: of the calls of a path that has this text in it (`-`: any; with `$` behind it, at its end) the first
   `skip` do not fail, and the next `times` take so many seconds longer, and fail where the number is not 0. Calls: open, read, write, sync, folder, truncate, remove, rename. Of a write
   that fails half is done at times. What failed stands in the file with `.done` behind its name. Pages are of 4,096 bytes, files have 64 MiB at most. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PAGE 4096
#define FAULTS 8
#define BYTES_MAX (64 << 20)

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct { char call[16], text[256]; int number, skip, times, seconds; } faults[FAULTS];
static int faults_n;
static unsigned chance = 1;
static int drops = 60, forgets = 40;

static const char *of(void) { return getenv("TESTS_VOLATILE_OF"); }
static const char *disk(void) { return getenv("TESTS_VOLATILE_DISK"); }
static int is_ours(const char *path) {
    const char *root = of();
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}
static int coin(int of_hundred) { return rand_r(&chance) % 100 < of_hundred; }

static int path_of(int descriptor, char *path) {
    char link[64];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, 1023);
    errno = kept;
    if (size < 0) return 0;
    path[size] = 0;
    return is_ours(path);
}

static void look(void) {
    static struct timespec seen;
    static ino_t inode;
    struct stat status;
    const char *by = getenv("TESTS_VOLATILE_FAULTS");
    if (!by || stat(by, &status)) { faults_n = 0; return; }
    if (status.st_ino == inode && status.st_mtim.tv_sec == seen.tv_sec && status.st_mtim.tv_nsec == seen.tv_nsec) return;
    inode = status.st_ino, seen = status.st_mtim, faults_n = 0;
    FILE *file = fopen(by, "r");
    if (!file) return;
    while (faults_n < FAULTS && fscanf(file, "%15s %255s %d %d %d %d", faults[faults_n].call, faults[faults_n].text, &faults[faults_n].number,
                                       &faults[faults_n].skip, &faults[faults_n].times, &faults[faults_n].seconds) == 6) faults_n++;
    fclose(file);
}

static int is_of(const char *text, const char *path) {
    size_t length = strlen(text), whole = strlen(path);
    if (!strcmp(text, "-")) return 1;
    if (text[length - 1] != '$') return strstr(path, text) != NULL;
    return whole >= length - 1 && !strncmp(path + whole - (length - 1), text, length - 1);
}

/* The error that this call of this path is to fail with; 0: it goes on. */
static int told(const char *call, const char *path) {
    int kept = errno, number = 0, seconds = 0;
    if (!is_ours(path)) return 0;
    pthread_mutex_lock(&lock);
    look();
    for (int i = 0; i < faults_n; i++) {
        if (strcmp(faults[i].call, call) || !is_of(faults[i].text, path) || !faults[i].times) continue;
        if (faults[i].skip) { faults[i].skip--; continue; }
        faults[i].times--;
        number = faults[i].number, seconds = faults[i].seconds;
        char done[1100];
        snprintf(done, sizeof done, "%s.done", getenv("TESTS_VOLATILE_FAULTS"));
        FILE *file = fopen(done, "a");
        if (file) { fprintf(file, "%s %d %s\n", call, number, path); fclose(file); }
        break;
    }
    pthread_mutex_unlock(&lock);
    if (seconds) sleep(seconds);
    errno = number ? number : kept;
    return number;
}
static int told_of(const char *call, int descriptor) {
    char path[1024];
    return path_of(descriptor, path) ? told(call, path) : 0;
}

static int part(const char *which, ino_t inode) {
    char path[1100];
    snprintf(path, sizeof path, "%s/%s/%lu", disk(), which, (unsigned long)inode);
    return REAL(open)(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

/* Under the lock: what the sync of a file brings to the disk. */
static void bring(int descriptor, int fails) {
    struct stat status;
    if (fstat(descriptor, &status)) return;
    char own[64];
    snprintf(own, sizeof own, "/proc/self/fd/%d", descriptor);
    int file = REAL(open)(own, O_RDWR | O_CLOEXEC), blocks = part("blocks", status.st_ino), dropped = part("dropped", status.st_ino);
    if (file < 0 || blocks < 0 || dropped < 0) { perror("volatile disk"); abort(); }
    struct stat there;
    fstat(blocks, &there);
    if (!fails || coin(50)) { if (REAL(ftruncate)(blocks, status.st_size)) abort(); there.st_size = status.st_size; }
    for (off_t at = 0; at < status.st_size; at += PAGE) {
        char now[PAGE] = {0}, before[PAGE] = {0}, is_dropped = 0;
        ssize_t size = REAL(pread)(file, now, PAGE, at);
        if (REAL(pread)(blocks, before, PAGE, at) < 0 || REAL(pread)(dropped, &is_dropped, 1, at / PAGE) < 0) abort();
        if (is_dropped || size <= 0 || !memcmp(now, before, PAGE)) continue;
        if (fails && coin(drops)) {
            is_dropped = 1;
            if (REAL(pwrite)(dropped, &is_dropped, 1, at / PAGE) != 1) abort();
            if (coin(forgets) && REAL(pwrite)(file, before, size, at) != size) abort();
        } else if (at < there.st_size) {
            if (at + size > there.st_size) size = there.st_size - at;
            if (REAL(pwrite)(blocks, now, size, at) != size) abort();
        }
    }
    close(file), close(blocks), close(dropped);
}

static void name(const char *path, ino_t inode, int is_there) {
    char entry[1200], *at;
    int length = snprintf(entry, sizeof entry, "%s/names/", disk());
    if (inode) {
        snprintf(entry + length, sizeof entry - length, "%lu %s", (unsigned long)inode, path);
        for (at = entry + length; *at; at++) if (*at == '/') *at = '%';
    }
    if (is_there) { int made = REAL(open)(entry, O_RDWR | O_CREAT | O_CLOEXEC, 0600); if (made < 0) abort(); close(made); }
    else REAL(unlink)(entry);
}

/* Of all names on the disk that are `path` (or directly in it, where it is a folder), those go that are not so any more. */
static void forget(const char *path, int is_folder) {
    char folder[1100], plain[1024], *at;
    snprintf(folder, sizeof folder, "%s/names", disk());
    DIR *names = opendir(folder);
    if (!names) abort();
    for (struct dirent *each; (each = readdir(names));) {
        char *space = strchr(each->d_name, ' ');
        if (!space) continue;
        snprintf(plain, sizeof plain, "%s", space + 1);
        for (at = plain; *at; at++) if (*at == '%') *at = '/';
        size_t length = strlen(path);
        int of_it = is_folder ? !strncmp(plain, path, length) && plain[length] == '/' && !strchr(plain + length + 1, '/') : !strcmp(plain, path);
        struct stat status;
        ino_t inode = strtoul(each->d_name, NULL, 10);
        if (of_it && (lstat(plain, &status) || status.st_ino != inode)) name(plain, inode, 0);
    }
    closedir(names);
}

/* A folder has another name: at once, also on the disk. */
static void move(const char *from, const char *to) {
    char folder[1100], plain[1024], moved[2100], *at;
    size_t length = strlen(from);
    snprintf(folder, sizeof folder, "%s/names", disk());
    DIR *names = opendir(folder);
    if (!names) abort();
    for (struct dirent *each; (each = readdir(names));) {
        char *space = strchr(each->d_name, ' ');
        if (!space) continue;
        snprintf(plain, sizeof plain, "%s", space + 1);
        for (at = plain; *at; at++) if (*at == '%') *at = '/';
        if (strncmp(plain, from, length) || plain[length] != '/') continue;
        ino_t inode = strtoul(each->d_name, NULL, 10);
        snprintf(moved, sizeof moved, "%s%s", to, plain + length);
        name(moved, inode, 1), name(plain, inode, 0);
    }
    closedir(names);
}

static int synced(int descriptor, int (*sync)(int)) {
    char path[1024];
    struct stat status;
    if (!path_of(descriptor, path) || fstat(descriptor, &status)) return sync(descriptor);
    int is_folder = S_ISDIR(status.st_mode), number = told(is_folder ? "folder" : "sync", path), kept;
    pthread_mutex_lock(&lock);
    kept = errno;
    if (is_folder && !number) {
        forget(path, 1);
        DIR *folder = opendir(path);
        for (struct dirent *each; folder && (each = readdir(folder));) {
            char inside[1300];
            snprintf(inside, sizeof inside, "%s/%s", path, each->d_name);
            if (!lstat(inside, &status) && S_ISREG(status.st_mode)) name(inside, status.st_ino, 1);
        }
        if (folder) closedir(folder);
    } else if (!is_folder) {
        bring(descriptor, number);
        struct stat named;
        if (!number && !lstat(path, &named) && named.st_ino == status.st_ino) { forget(path, 0); name(path, status.st_ino, 1); }
    }
    errno = kept;
    pthread_mutex_unlock(&lock);
    return number ? -1 : 0;
}

/* What was written is dropped no more. */
static void dirty(int descriptor, off_t from, off_t to) {
    char path[1024];
    struct stat status;
    int kept = errno;
    if (!path_of(descriptor, path) || fstat(descriptor, &status)) return;
    pthread_mutex_lock(&lock);
    int dropped = part("dropped", status.st_ino);
    struct stat known;
    if (dropped >= 0 && !fstat(dropped, &known))
        for (off_t page = from / PAGE; page < known.st_size && page * PAGE < to; page++) if (REAL(pwrite)(dropped, "", 1, page) != 1) abort();
    if (dropped >= 0) close(dropped);
    pthread_mutex_unlock(&lock);
    errno = kept;
}

/* The file that is about to lose a name. */
static void keep(const char *path) {
    char kept[1100];
    struct stat status;
    int number = errno;
    if (is_ours(path) && !lstat(path, &status) && S_ISREG(status.st_mode)) {
        snprintf(kept, sizeof kept, "%s/kept/%lu", disk(), (unsigned long)status.st_ino);
        if (REAL(link)(path, kept) && errno != EEXIST) abort();
    }
    errno = number;
}

static size_t half_of(int number, size_t n) {
    pthread_mutex_lock(&lock);
    size_t size = coin(50) ? n / 2 : 0;
    pthread_mutex_unlock(&lock);
    return size;
}

int fsync(int d) { return synced(d, REAL(fsync)); }
int fdatasync(int d) { return synced(d, REAL(fdatasync)); }

static ssize_t written_at(int d, const void *b, size_t n, off_t o) {
    int number = told_of("write", d);
    if (number) {
        size_t half = half_of(number, n);
        if (half && REAL(pwrite)(d, b, half, o) > 0) dirty(d, o, o + half);
        errno = number;
        return -1;
    }
    ssize_t size = REAL(pwrite)(d, b, n, o);
    if (size > 0) dirty(d, o, o + size);
    return size;
}
ssize_t pwrite(int d, const void *b, size_t n, off_t o) { return written_at(d, b, n, o); }
ssize_t pwrite64(int d, const void *b, size_t n, off64_t o) { return written_at(d, b, n, o); }
ssize_t write(int d, const void *b, size_t n) {
    int number = told_of("write", d);
    if (number) n = half_of(number, n);
    ssize_t size = number && !n ? 0 : REAL(write)(d, b, n);
    int kept = errno;
    char path[1024];
    if (size > 0 && path_of(d, path)) { off_t end = lseek(d, 0, SEEK_CUR); dirty(d, end - size, end); }
    errno = number ? number : kept;
    return number ? -1 : size;
}
ssize_t pwritev(int d, const struct iovec *v, int n, off_t o) {
    if (told_of("write", d)) return -1;
    ssize_t size = REAL(pwritev)(d, v, n, o);
    if (size > 0) dirty(d, o, o + size);
    return size;
}
ssize_t pwritev64(int d, const struct iovec *v, int n, off64_t o) { return pwritev(d, v, n, o); }
/* Python's os.pwritev. */
ssize_t pwritev2(int d, const struct iovec *v, int n, off_t o, int f) {
    if (told_of("write", d)) return -1;
    ssize_t size = REAL(pwritev2)(d, v, n, o, f);
    if (size > 0) dirty(d, o, o + size);
    return size;
}
ssize_t pwritev64v2(int d, const struct iovec *v, int n, off64_t o, int f) { return pwritev2(d, v, n, o, f); }
ssize_t read(int d, void *b, size_t n) { return told_of("read", d) ? -1 : REAL(read)(d, b, n); }
ssize_t pread(int d, void *b, size_t n, off_t o) { return told_of("read", d) ? -1 : REAL(pread)(d, b, n, o); }
ssize_t pread64(int d, void *b, size_t n, off64_t o) { return told_of("read", d) ? -1 : REAL(pread64)(d, b, n, o); }
static int truncated(int d, off_t size) {
    if (told_of("truncate", d)) return -1;
    int answer = REAL(ftruncate)(d, size);
    if (!answer) dirty(d, size, BYTES_MAX);
    return answer;
}
int ftruncate(int d, off_t size) { return truncated(d, size); }
int ftruncate64(int d, off64_t size) { return truncated(d, size); }
int unlink(const char *p) { if (told("remove", p)) return -1; keep(p); return REAL(unlink)(p); }
int unlinkat(int d, const char *p, int f) {
    char path[2100];
    if (*p == '/' || d == AT_FDCWD) snprintf(path, sizeof path, "%s", p);
    else if (path_of(d, path)) { size_t length = strlen(path); snprintf(path + length, sizeof path - length, "/%s", p); }
    else path[0] = 0;
    if (!(f & AT_REMOVEDIR)) { if (told("remove", path)) return -1; keep(path); }
    return REAL(unlinkat)(d, p, f);
}
int rename(const char *p, const char *q) {
    struct stat status;
    if (told("rename", p)) return -1;
    keep(q);
    int is_folder = !lstat(p, &status) && S_ISDIR(status.st_mode), answer = REAL(rename)(p, q), kept = errno;
    if (!answer && is_folder && is_ours(p)) { pthread_mutex_lock(&lock); move(p, q); pthread_mutex_unlock(&lock); }
    errno = kept;
    return answer;
}
int open(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t mode = (f & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; va_end(rest);
    return told("open", p) ? -1 : REAL(open)(p, f, mode);
}
int open64(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t mode = (f & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; va_end(rest);
    return told("open", p) ? -1 : REAL(open)(p, f, mode);
}

__attribute__((constructor)) static void begin(void) {
    const char *seed = getenv("TESTS_VOLATILE_SEED");
    const char *shares = getenv("TESTS_VOLATILE_SHARES");
    chance = (seed ? atoi(seed) : 1) + getpid();
    if (shares) sscanf(shares, "%d,%d", &drops, &forgets);
}

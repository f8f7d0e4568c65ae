//! Which pages of a pool are in use, and by how many sequences. Host side only; nothing here touches a GPU.

use std::collections::BTreeSet;

/// The pages of a pool.
#[derive(Debug)]
pub(super) struct Pool {
    pages: Vec<Page>,
    /// Lowest first, so that pages which are taken together mostly follow one another.
    free: BTreeSet<u32>,
    /// Counts what happens to pages, so that it has an order.
    clock: u64,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// Sequences whose block table names it.
    users: u32,
    /// When it was taken last.
    taken: u64,
    /// When it was written, and from which row on. Rows grow from one to the next: an earlier write from a
    /// later row says nothing more.
    writes: Vec<(u64, usize)>,
}

/// The first rows of a page as they were at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageUse {
    pub(super) page: u32,
    pub(super) rows: usize,
    taken: u64,
    at: u64,
}

impl Pool {
    pub(super) fn new(pages: usize) -> Self {
        Pool {
            pages: vec![Page::default(); pages],
            free: (0..pages as u32).collect(),
            clock: 0,
        }
    }

    pub(super) fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Takes a free page; `None` where there is none.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop_first()?;
        self.clock += 1;
        self.pages[page as usize] = Page {
            users: 1,
            taken: self.clock,
            writes: Vec::new(),
        };
        Some(page)
    }

    /// One more sequence uses a page.
    pub(super) fn share(&mut self, page: u32) {
        self.pages[page as usize].users += 1;
    }

    /// One sequence less uses a page; the last one frees it.
    pub(super) fn release(&mut self, page: u32) {
        let own = &mut self.pages[page as usize];
        own.users = own.users.saturating_sub(1);
        if own.users == 0 {
            self.free.insert(page);
        }
    }

    /// Sequences that use a page.
    pub(super) fn users(&self, page: u32) -> u32 {
        self.pages[page as usize].users
    }

    /// A page is written from that row on.
    pub(super) fn write(&mut self, page: u32, row: usize) {
        self.clock += 1;
        let writes = &mut self.pages[page as usize].writes;
        writes.retain(|(_, earlier)| *earlier < row);
        writes.push((self.clock, row));
    }

    /// The first rows of a page, as they are now.
    pub(super) fn rows(&self, page: u32, rows: usize) -> PageUse {
        PageUse {
            page,
            rows,
            taken: self.pages[page as usize].taken,
            at: self.clock,
        }
    }

    /// Whether those rows are still what they were.
    pub(super) fn holds(&self, then: PageUse) -> bool {
        self.pages.get(then.page as usize).is_some_and(|page| {
            let mut writes = page.writes.iter();
            page.users > 0
                && page.taken == then.taken
                && !writes.any(|(at, row)| *at > then.at && *row < then.rows)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_free_once_nobody_uses_them() {
        let mut pool = Pool::new(2);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        assert_eq!((a, b, pool.take()), (0, 1, None));
        pool.share(a);
        pool.release(a);
        assert_eq!((pool.free_pages(), pool.users(a)), (0, 1));
        pool.release(a);
        assert_eq!((pool.free_pages(), pool.take()), (1, Some(a)));
    }

    #[test]
    fn rows_hold_until_they_are_written_or_their_page_is_freed() {
        let mut pool = Pool::new(1);
        let page = pool.take().unwrap();
        pool.write(page, 0);
        let four = pool.rows(page, 4);
        pool.write(page, 4);
        pool.write(page, 5);
        assert!(
            pool.holds(four),
            "what is written behind them does not matter"
        );
        pool.write(page, 3);
        assert!(!pool.holds(four), "the last of them was written");
        let three = pool.rows(page, 3);
        pool.write(page, 3);
        assert!(pool.holds(three));
        pool.release(page);
        assert!(!pool.holds(three), "freed");
        assert_eq!(pool.take(), Some(page));
        assert!(!pool.holds(three), "taken again, it is another page");
    }
}

import unittest

from textkit import slugify


class SlugTest(unittest.TestCase):
    def test_spaces_become_hyphens(self):
        self.assertEqual(slugify("red apple pie"), "red-apple-pie")

    def test_capitals_become_small(self):
        self.assertEqual(slugify("Red Apple Pie"), "red-apple-pie")

    def test_hyphens_are_kept(self):
        self.assert▏Equal(slugify("…▕


if __name__ == "__main__":
    unittest.main()

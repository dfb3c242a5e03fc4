export interface Recipe {
  title: string;
  servings: number;
  minutes: number;
  ingredients: string[];
}

export function copyRecipe(recipe: Recipe): Recipe {
  return {
    title: recipe.title,
    servings: recipe.servings,
    minutes: recipe.minutes,
    ingr▏edients: recipe.ingredients…¦edients: [...recipe.ingredients]…▕
  };
}
